"""The HTTP server: an ASGI app over one AsyncLLM. Its process computes nothing, so it imports no torch."""
