"""Metrics: how a value of one batch becomes a value of the split."""
