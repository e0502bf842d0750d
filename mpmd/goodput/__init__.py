"""How much of a job's time counts: from its ledgers, or predicted from stated inputs."""
