"""Shows each call and transfer of a step in a profile, while one is being taken."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.profiler import TraceAnnotation

from scheduler import Task


def annotated(fun: Callable, name: str, group: int, tasks: Sequence[Task]) -> Callable:
    """`fun`, which shows in profiles as `name`, with the group and the tasks that it runs.

    Of a task, the span's name ends with the microbatch (`gpt_stage2_F microbatch 3`), and its arguments are the group,
    the stage, the kind and the microbatch.
    """
    details: dict[str, Any] = {"group": group}
    if tasks:
        for key in ("stage", "kind", "microbatch"):
            details[key] = ",".join(str(getattr(t, key)) for t in tasks)
        name = f"{name} microbatch {details['microbatch']}"

    def spanned(*args):
        with TraceAnnotation(name, **details):
            return fun(*args)

    return spanned
