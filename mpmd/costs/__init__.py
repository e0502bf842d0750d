"""What the equations of a step cost: work, bytes, collectives, and the time that these take on a target."""
