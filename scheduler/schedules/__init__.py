"""The orders of tasks: by rule, by list scheduling, by pattern, by hand."""
