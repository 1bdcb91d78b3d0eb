"""Imported by a hook when it runs."""

LATE = 1.0


def lately(x):
    return x * LATE
