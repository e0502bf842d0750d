"""What happened in a run, and why it took so long: needs no devices."""
