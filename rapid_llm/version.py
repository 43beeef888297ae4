"""The version, read by the build and by ``rapid-llm --version``."""

__version__ = "0.1.0"
