"""Turns one flat jaxpr into an outline, the stage and group of each equation: pure passes that run nothing."""
