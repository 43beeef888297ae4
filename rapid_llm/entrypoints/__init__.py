"""Text in, text out: the Python object and the command. No scheduling, no tensors."""
