"""From a tree of stored arrays and a mapping to the tree of new arrays: what each takes from which old ones."""
