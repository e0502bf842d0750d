"""From task times and a limit of memory to better orders: search and bounds."""
