"""One forward pass, seen once, however many probes look at it."""
