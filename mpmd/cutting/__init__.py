"""From a loop that may be cut in many places to a loop with the stages that its schedule asks for."""
