"""Checkpoints as files: what is stored, under which paths, with which checksums."""
