"""Traffic of every kind in miniature, seeded: what is asked of an engine, and what must hold when all of it is over."""
