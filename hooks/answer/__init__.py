"""Why this answer and not that one: what two texts differ in, and what of it decides."""
