"""Runs rows against the float64 references and keeps the runs as evidence. Imports torch."""
