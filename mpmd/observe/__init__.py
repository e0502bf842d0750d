"""From the events of a running step to records and flight files, which need no devices to be read."""
