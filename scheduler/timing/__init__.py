"""Orders of tasks on a clock: how long they take, and pictures of that."""
