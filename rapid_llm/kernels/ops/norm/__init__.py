"""RMS norms."""
