"""Pipeline schedules: orders of tasks, proved before they run, simulated, searched and drawn. Standard library alone."""

from scheduler.errors import ScheduleError
from scheduler.generators import EagerOneFOneB, GPipe, InterleavedOneFOneB, OneFOneB
from scheduler.instructions import (
    Call,
    Edge,
    Free,
    Instruction,
    Program,
    Recv,
    Run,
    Send,
    TaskGraph,
    Value,
    concatenate,
)
from scheduler.lowering import lower
from scheduler.merging import merge
from scheduler.simulate import Costs, Timeline, simulate
from scheduler.task import Schedule, Task
from scheduler.validate import Report, check

__all__ = [
    "Call",
    "Costs",
    "EagerOneFOneB",
    "Edge",
    "Free",
    "GPipe",
    "Instruction",
    "InterleavedOneFOneB",
    "OneFOneB",
    "Program",
    "Recv",
    "Report",
    "Run",
    "Schedule",
    "ScheduleError",
    "Send",
    "Task",
    "TaskGraph",
    "Timeline",
    "Value",
    "check",
    "concatenate",
    "lower",
    "merge",
    "simulate",
]
