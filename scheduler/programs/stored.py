"""Programs as plain data, to be written to a file and read again."""

from collections.abc import Iterable, Mapping

from scheduler.programs.instructions import Call, Free, Instruction, Program, Recv, Run, Send, Value
from scheduler.task import Task


def to_data(program: Program) -> dict[str, object]:
    """Returns a program as lists, tuples, numbers and text, which JSON can hold."""
    return {
        "groups": [[_instruction(i) for i in group] for group in program.groups],
        "placement": list(program.placement),
        "tasks": [sorted(map(str, tasks)) for tasks in program.tasks],
        "inputs": [sorted(values, key=str) for values in program.inputs],
        "outputs": [sorted(values, key=str) for values in program.outputs],
        "nbytes": dict(program.nbytes),
        "placements": list(map(list, program.placements)),
    }


def of_data(data: Mapping) -> Program:
    """Returns the program of such data, the inverse of `to_data`; KeyError, TypeError or ValueError if it is none."""
    return Program(
        tuple(tuple(map(_read, group)) for group in data["groups"]),
        tuple(data["placement"]),
        tuple(frozenset(map(Task.parse, tasks)) for tasks in data["tasks"]),
        tuple(frozenset(_read_values(values)) for values in data["inputs"]),
        tuple(frozenset(_read_values(values)) for values in data["outputs"]),
        dict(data["nbytes"]),
        tuple(map(tuple, data.get("placements", ()))),  # a file of an earlier version has none
    )


def _read_values(values: Iterable[Iterable]) -> tuple[Value, ...]:
    return tuple(Value(*value) for value in values)


def _instruction(instruction: Instruction) -> list[object]:
    match instruction:
        case Run(_, reads, writes, donates):
            return ["run", [*map(str, instruction.tasks)], reads, writes, donates, instruction.loop]
        case Call(name, reads, writes, donates):
            return ["call", name, reads, writes, donates]
        case Send(value, group):
            return ["send", value, group]
        case Recv(value, group):
            return ["recv", value, group]
        case Free(value):
            return ["free", value]


def _read(row: list) -> Instruction:
    match row:
        case ["run", tasks, reads, writes, donates, loop]:
            first, *also = map(Task.parse, tasks)
            used = _read_values(reads), _read_values(writes), _read_values(donates)
            return Run(first, *used, tuple(also), loop)
        case ["call", name, reads, writes, donates]:
            return Call(name, _read_values(reads), _read_values(writes), _read_values(donates))
        case ["send", value, group]:
            return Send(Value(*value), group)
        case ["recv", value, group]:
            return Recv(Value(*value), group)
        case ["free", value]:
            return Free(Value(*value))
    raise ValueError(f"{row!r} is no instruction.")
