"""One attention layer and labelled sequences: a model that fits them, or a proof in integers."""
