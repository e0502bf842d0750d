"""Helpers for all packages: text, files, waiting, exits, the collector. Needs Python alone."""
