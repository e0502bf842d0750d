"""From a schedule to the instructions of each group, and proofs that they run."""
