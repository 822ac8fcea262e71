"""Small language models, trained on text that every Python has: its own standard library."""
