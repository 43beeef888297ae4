"""Measurements: each file a question, each result a JSON line under results/."""
