"""How well a state can give an attended token back: linear maps, fitted and held out."""
