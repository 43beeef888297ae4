"""``rapid-llm bench serve``: a load generator for any OpenAI-compatible URL, and what it reports. Imports no torch."""
