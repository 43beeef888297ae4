"""Sampling and log-probabilities."""
