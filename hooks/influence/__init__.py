"""Which inputs a state depends on: derivatives, and tokens replaced by others."""
