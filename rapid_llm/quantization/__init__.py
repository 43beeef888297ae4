"""Weights kept in fewer bits: what a layer holds in place of a matrix, and which op serves it."""
