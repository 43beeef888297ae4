"""What a kernel is, the rows and contracts of every family, and the kernels themselves."""
