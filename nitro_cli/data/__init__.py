"""Splits and batches: the source contract, ``ArrayLoader``, routing, padding and prefetch."""
