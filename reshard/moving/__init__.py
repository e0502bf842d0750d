"""Moves shards from one layout to another, within a bound of memory."""
