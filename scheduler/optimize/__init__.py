"""Better orders than the built-in ones: search, bounds and exact answers."""
