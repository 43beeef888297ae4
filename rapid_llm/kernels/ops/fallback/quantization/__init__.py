"""Quantised products and quantisers in plain torch."""
