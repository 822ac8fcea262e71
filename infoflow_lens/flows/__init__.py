"""The flow of information in one or a few inputs: what can reach a state beside what does."""
