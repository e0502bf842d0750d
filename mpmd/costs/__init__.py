"""From a step's equations and a target's data sheet to operations, bytes, collectives and their durations."""
