"""The ops in plain torch, a module per family: the lowest-ranked rows, for any device."""
