"""Runs: the folder that a command writes to."""
