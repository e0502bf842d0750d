"""From stages and microbatches to an order of tasks for each group: by rule, list, block or hand."""
