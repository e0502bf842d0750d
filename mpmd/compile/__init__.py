"""From a partitioned step to one executable per distinct program, and each group's instructions."""
