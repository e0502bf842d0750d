"""From a user's step and its arguments to one flat jaxpr."""
