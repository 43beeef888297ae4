"""Ops that do in one pass what others do in several: what a quantised product or attention reads, from what it is made."""
