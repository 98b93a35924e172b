"""Weights on their way to workers: published in versions, taken whole."""
