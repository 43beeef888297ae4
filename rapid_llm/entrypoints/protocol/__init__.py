"""What HTTP clients and the server say to each other, as types, which check requests and make the OpenAPI page."""
