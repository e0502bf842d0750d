"""The orders of tasks: by rule, by list scheduling, by a repeated block, by hand."""
