"""Checkpoints as they are, what a layout would read of them, and others made of them."""
