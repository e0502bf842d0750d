"""Numbers for the values of a step: one list holds them all, and each value of each group has a slot in it."""

import copy
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import Device, MpmdMesh
from mpmd.job.job import Job
from mpmd.run import device_put
from scheduler import Value

SlotValues = list[Any]  # by slot: an array, or None before it is made and after it is freed


class Slots:
    """Slot numbers of the values that groups of this process hold."""

    def __init__(self, mesh: MpmdMesh, job: Job | None):
        self._mesh = mesh
        self.numbers: dict[tuple[int, int], dict[int, int]] = {}  # by group and loop, the slots of microbatch numbers
        self.names: dict[compat.Var, str] = {}  # of the variables outside the loops
        self._is_alone = job is None
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._constants: dict[int, tuple[np.generic, Device | NamedSharding]] = {}

    def extended(self, alike: Mapping[tuple[int, Value], tuple[int, Value]]) -> "Slots":
        """Returns a copy to which new values can be added; `alike` maps one to the value that it shares a slot with."""
        found = copy.copy(self)
        found.names = self.names.copy()
        found._numbers = self._numbers | {new: self._numbers[old] for new, old in alike.items()}
        return found

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, group: int, value: Hashable) -> int:
        return self._numbers.setdefault((group, value), len(self._numbers))

    def values(self, numbers: Iterable[int]) -> list[Any]:
        """Returns the value of each slot; for the slot of a constant, the constant itself."""
        known = {slot: value for (_, value), slot in self._numbers.items()}
        return [self._constants[slot][0] if slot in self._constants else known[slot] for slot in numbers]

    def has(self, group: int, value: Hashable) -> bool:
        """Returns whether an instruction reads or writes a value."""
        return (group, value) in self._numbers

    @property
    def of_microbatches(self) -> set[int]:
        """The slots of values that belong to a microbatch."""
        values = self._numbers.items()
        return {slot for (_, v), slot in values if isinstance(v, Value) and v.microbatch is not None}

    def sizes(self, nbytes: Mapping[str, int]) -> dict[int, tuple[int, int]]:
        """Maps the slot of each value to its group and its bytes."""
        values = [(slot, group, v) for (group, v), slot in self._numbers.items() if isinstance(v, Value)]
        return {slot: (group, nbytes.get(v.name, 0)) for slot, group, v in values}

    def around(self, group: int, v: compat.Var) -> int:
        """Returns the slot of a variable of the step, outside of the loops."""
        return self.of(group, Value(self.names[v]))

    def of_all(self, held: Iterable[tuple[compat.Var, Iterable[int]]]) -> list[list[tuple[int, int]]]:
        """Returns, per variable, the groups of this process that hold it and its slots there."""
        local = self._mesh.local_groups
        return [[(g, self.around(g, v)) for g in sorted(groups) if g in local] for v, groups in held]

    def of_constant(self, group: int, value: np.generic) -> int:
        """Returns the slot of a number that is a constant of a program."""
        return self._of_number(group, ("constant", str(value.dtype), int(value)), value)

    def of_microbatch(self, group: int, loop: int, microbatch: int) -> int:
        """Returns the slot of a microbatch's number."""
        slot = self._of_number(group, ("microbatch", loop, microbatch), np.int32(microbatch))
        self.numbers.setdefault((group, loop), {})[microbatch] = slot
        return slot

    def _of_number(self, group: int, key: Hashable, value: np.generic) -> int:
        slot = self.of(group, key)
        if slot not in self._constants:
            sharding = NamedSharding(self._mesh.groups[group], PartitionSpec())
            target = device_put.target_of(sharding) if self._is_alone else sharding
            self._constants[slot] = value, target
        return slot

    def template(self) -> SlotValues:
        """Returns all slots as they are before a step. Puts all constants on devices in one batch."""
        slots: SlotValues = [None] * len(self)
        if self._constants:
            values, targets = map(list, zip(*self._constants.values(), strict=True))
            placed = jax.device_put(values, targets) if self._is_alone else device_put.place_all(values, targets)
            for slot, constant in zip(self._constants, placed, strict=True):
                slots[slot] = constant
        return slots
