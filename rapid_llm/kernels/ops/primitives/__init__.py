"""What kernels of several families are made of."""
