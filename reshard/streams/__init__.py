"""Versions of a tree of arrays that flow from some processes to others: whole, the newest one, without mixing."""
