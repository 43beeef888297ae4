"""Shipped tiles: one <device>.json each, written by the tuner."""
