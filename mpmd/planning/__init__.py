"""From a compiled step and a machine that is not here to memory, communication and time on it."""
