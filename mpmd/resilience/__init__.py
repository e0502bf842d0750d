"""Loops that outlive their processes: states in the memory of keepers, which a restarted job goes on from."""
