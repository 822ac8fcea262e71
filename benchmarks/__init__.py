"""Ratios of our ways to named alternatives, each pair timed in the same run."""
