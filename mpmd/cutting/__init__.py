"""Decides which of the places where a stage may end become stage ends, and makes marks of these."""
