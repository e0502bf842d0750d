"""New trees of stored arrays: what each new array takes from which old ones, by hand or by a mapping file."""
