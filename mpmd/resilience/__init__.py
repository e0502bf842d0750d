"""Loops that outlive their processes: a restarted job continues from states in the memory of keepers."""
