"""Which pages belong to whom. Bookkeeping only, torch-free."""
