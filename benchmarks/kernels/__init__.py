"""Benchmarks of single kernels: their frame, the peers that they stand beside, and one bench an op family."""
