"""Memory, communication and time of a compiled step on a machine that is not here."""
