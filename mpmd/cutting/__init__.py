"""From a loop that may be cut in many places to one with the stages that its schedule asks for."""
