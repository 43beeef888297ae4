"""A plain-torch float64 twin of every op; for verify, tests and benchmarks only."""
