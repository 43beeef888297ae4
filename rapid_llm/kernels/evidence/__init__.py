"""Shipped evidence: one <device>.json each, written by verify runs."""
