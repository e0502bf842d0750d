"""From task times and a limit of memory to better orders: search, bounds and exact answers."""
