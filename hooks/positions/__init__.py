"""Which key positions each head attends to most."""
