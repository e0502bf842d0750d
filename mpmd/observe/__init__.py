"""Records and flight files of a running step's events, which can be read without devices."""
