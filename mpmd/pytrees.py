"""Names for pytrees in annotations: JAX has no types for them."""

from typing import Any

PyTree = Any  # JAX's pytrees have no type of their own
TreeDef = Any  # JAX's PyTreeDef, which is a variable to type checkers
