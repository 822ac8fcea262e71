"""Interventions: named edits of a pass, and what each does to the output."""
