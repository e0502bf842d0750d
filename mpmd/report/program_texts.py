"""The text of a compiled step's programs, before and after XLA's compilation."""

from mpmd.compile.executable import Executable
from mpmd.compile.step import StepPrograms

DIALECTS = ("hlo", "stablehlo")


def texts(programs: StepPrograms, stage: int | None, kind: str | None, dialect: str | None) -> str:
    """Returns the programs of tasks (and segments, if neither stage nor kind is given), each below its name. Raises a
    ValueError if there is no such dialect, or no such task.
    """
    if dialect not in (None, *DIALECTS):
        raise ValueError(f"as_text: dialect={dialect!r}. Pass one of {', '.join(map(repr, DIALECTS))}.")
    tasks = [(place, e) for loop in programs.loops for place, e in loop.executables.items()]
    chosen = [e for place, e in tasks if stage in (None, place.stage) and kind in (None, place.kind)]
    if stage is None and kind is None:
        chosen += programs.segments.values()
    if not chosen:
        asked = ", ".join(f"{n}={x!r}" for n, x in (("stage", stage), ("kind", kind)) if x is not None)
        has = ", ".join(dict.fromkeys(str(place) for place, _ in tasks)) or "no tasks, since it has no treduce loop"
        raise ValueError(f"as_text: no task has {asked or 'a program'}. The step has {has}.")
    return "\n\n".join(_text(e, dialect or "hlo") for e in chosen)


def _text(executable: Executable, dialect: str) -> str:
    run = executable.runs
    names = ", ".join(d.program.name for d in run)
    if len(run) > 1:
        note = f" runs as {len(run)} programs one after the other: {names}"
    else:
        note = "" if names == executable.name else f" runs the same program as {names}"
    found = [d.text(dialect, executable.name if len(run) == 1 else d.program.name) for d in run]
    return "\n".join([f"// {executable.name}{note}", *found])
