"""The models that the project hosts, on TransformerLens 3 and 4."""
