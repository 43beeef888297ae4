"""Ops that write what a quantised product reads, in one pass over what they are made from."""
