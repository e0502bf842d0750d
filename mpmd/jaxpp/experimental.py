"""`from mpmd.jaxpp.experimental import mpmd`, instead of `from jaxpp.experimental import mpmd`."""

from mpmd.jaxpp import tasks as mpmd

__all__ = ["mpmd"]
