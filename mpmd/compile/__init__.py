"""One executable per distinct program, and the instructions of the step. Knows nothing of processes."""
