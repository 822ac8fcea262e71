"""Tests of infoflow_lens.flows."""
