"""Pipeline schedules: orders of tasks, proved before they run, simulated, searched and drawn. Needs Python alone."""

from scheduler.errors import ScheduleError
from scheduler.optimize.microbatches import order_microbatches
from scheduler.optimize.search import Found, investigate, search
from scheduler.programs.check import Report, check
from scheduler.programs.instructions import Call, Edge, Free, Instruction, Program, Recv, Run, Send, TaskGraph, Value
from scheduler.programs.lowering import lower
from scheduler.programs.merging import merge
from scheduler.schedules.adaptive import Adaptive
from scheduler.schedules.catalogue import make
from scheduler.schedules.custom import CustomSchedule
from scheduler.schedules.graph import GraphSchedule
from scheduler.schedules.one_f_one_b import EagerOneFOneB, GPipe, InterleavedGPipe, InterleavedOneFOneB, OneFOneB
from scheduler.schedules.v_in_little_memory import VHalf, VMin
from scheduler.schedules.v_shaped import DualPipeV, ZeroBubbleV
from scheduler.schedules.zero_bubble import InterleavedZeroBubble, KimiK2, ZeroBubbleH1, ZeroBubbleH2
from scheduler.task import Schedule, Task
from scheduler.timing.costs import Costs
from scheduler.timing.simulate import simulate
from scheduler.timing.timeline import Timeline

__all__ = [
    "Adaptive",
    "Call",
    "Costs",
    "CustomSchedule",
    "DualPipeV",
    "EagerOneFOneB",
    "Edge",
    "Found",
    "Free",
    "GPipe",
    "GraphSchedule",
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
    "investigate",
    "lower",
    "make",
    "merge",
    "order_microbatches",
    "search",
    "simulate",
]
