"""Runs from config to verdict: each trains, probes, predicts, compares and reports."""
