"""From the ledgers of a job, or from stated inputs, to how much of its time counts."""
