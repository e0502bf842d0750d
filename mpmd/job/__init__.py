"""Several processes as one job: how they find each other, watch each other and end together."""
