"""Decides which of the places where a stage may end become stage ends, and cuts scans and stacked arrays there."""
