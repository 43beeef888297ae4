"""End-to-end measurements of the engine."""
