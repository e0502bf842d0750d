"""From an order of tasks and their times to a timeline: how long it takes, where it waits, and pictures of it."""
