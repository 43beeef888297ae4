"""How long rows take on this machine's GPU: timer, ceilings, calls of real sizes, the search for tiles."""
