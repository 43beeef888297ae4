"""Embedding look-ups."""
