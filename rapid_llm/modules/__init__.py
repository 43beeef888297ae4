"""Layers: what a model is put together from."""
