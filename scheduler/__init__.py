"""Pipeline schedules: orders of tasks, proved before they run, simulated, searched and drawn. Needs Python alone."""

from scheduler.catalogue import make
from scheduler.custom import CustomSchedule
from scheduler.errors import ScheduleError
from scheduler.generators import EagerOneFOneB, GPipe, InterleavedGPipe, InterleavedOneFOneB, OneFOneB
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
from scheduler.search import Found, investigate, search
from scheduler.simulate import Costs, Timeline, simulate
from scheduler.task import Schedule, Task
from scheduler.v_memory import VHalf, VMin
from scheduler.v_schedules import DualPipeV, ZeroBubbleV
from scheduler.validate import Report, check
from scheduler.zero_bubble import InterleavedZeroBubble, KimiK2, ZeroBubbleH1, ZeroBubbleH2

__all__ = [
    "Call",
    "Costs",
    "CustomSchedule",
    "DualPipeV",
    "EagerOneFOneB",
    "Edge",
    "Found",
    "Free",
    "GPipe",
    "Instruction",
    "InterleavedGPipe",
    "InterleavedOneFOneB",
    "InterleavedZeroBubble",
    "KimiK2",
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
    "VHalf",
    "VMin",
    "Value",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "check",
    "concatenate",
    "investigate",
    "lower",
    "make",
    "merge",
    "search",
    "simulate",
]
