"""Helpers of the experiments."""

from toolbox.layers import squash as squash
