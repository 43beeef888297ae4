"""Which row serves an op, and why: catalog, evidence, ranking, dispatch, explain. Torch-free."""
