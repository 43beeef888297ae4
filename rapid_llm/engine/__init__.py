"""A request's life. Token half: engine, request, scheduler. Text half: tokenizer, templates, stop, text. Torch-free."""
