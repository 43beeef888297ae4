"""What a model's text says beside its content: calls of tools in the model's own format, and reasoning. Torch-free."""
