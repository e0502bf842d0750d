"""From the arguments of `python -m reshard` to a table, a report of reads, or another checkpoint."""
