"""From one flat jaxpr to an outline, the stage and group of each equation: pure passes that run nothing."""
