"""Products with quantised weights, and the quantisers of activations."""
