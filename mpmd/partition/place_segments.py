"""Decides which group runs what outside of the loops; the rules are in `outline`."""

from collections import defaultdict

from mpmd import _jax_compat as compat
from mpmd.arrays.mesh import MpmdMesh
from mpmd.errors import StageError
from mpmd.ops.cross_group import place_p
from mpmd.partition import equations
from mpmd.partition.control_flow import pinned_parts
from mpmd.partition.outline import Groups, Loop, Outline, Segment, Transfer, match_state, step_items
from mpmd.partition.pack_scalars import pack_scalars
from mpmd.partition.pins import Pins, StageText, runs_once, with_fewest_bytes
from mpmd.tracing.trace import Trace

_END = 1 << 30  # the level of what the step returns


def outline_step(trace: Trace, mpmd_mesh: MpmdMesh, in_groups, out_groups, forwarded=frozenset()) -> Outline:
    """Places every equation of a traced step.

    Args:
      trace: the step.
      mpmd_mesh: the groups.
      in_groups: per flat argument, the groups that hold it, or None to find out.
      out_groups: per flat result, the groups that shall hold it, or None.
      forwarded: flat arguments that may be returned as they are (donated ones: nobody else holds them).

    Raises:
      StageError: a loop does not fit its schedule or the mesh.
    """
    with compat.use_abstract_mesh(mpmd_mesh.groups[0].abstract_mesh):
        items, outvars = step_items(trace, mpmd_mesh, forwarded)
        donors = match_state(trace)
        placer = _Placer(trace, mpmd_mesh.num_groups, items, outvars, list(in_groups), list(out_groups), donors)
        placer.solve()
        return placer.outline()


class _Placer:
    """Finds, for each equation, the groups that run it, and for each variable, the groups that want it."""

    def __init__(self, trace, num_groups, items, outvars, in_groups, out_groups, donors):
        self.trace = trace
        self.everywhere = frozenset(range(num_groups))
        self.items = items
        self.outvars = outvars
        self.invars = trace.jaxpr.invars
        num_consts = len(trace.consts)
        self.in_groups = [None] * num_consts + [g if g is None else g or frozenset([0]) for g in in_groups]
        self.out_groups = [g if g is None else g or frozenset([0]) for g in out_groups]
        self.donors = [d if d is None else d + num_consts for d in donors]
        self.next_of = {self.invars[d]: v for d, v in zip(self.donors, outvars, strict=True) if d is not None}
        self.placed: dict[compat.Var, Groups] = {}  # by the user
        self.held: Pins
        self.pins: list[Groups | None] = []
        self.runs: list[Groups] = []
        self.out_placed: list[Groups] = []
        self.wanted: dict[compat.Var, set[int]] = {}
        self.inputs: list[Groups] = []

    def solve(self):
        for item in self.items:
            if not isinstance(item, Loop) and item.primitive is place_p:
                self.placed[item.outvars[0]] = _checked_groups(item, self.everywhere)
        self._pin_loop_arguments()
        self._pin()
        wish = [g or frozenset() for g in self.out_groups]
        wish = self._settle(wish, final=False)  # what has to be somewhere, first; then what may be anywhere
        wish = self._settle(wish, final=True)
        self.out_placed = [w or self._somewhere(v) for w, v in zip(wish, self.outvars, strict=True)]

    def _settle(self, wish, final: bool):
        """Demands results and places arguments until neither changes; returns where results are wanted.

        A result's groups only grow, so the number of (result, group) pairs that are not wished for falls each time.
        """
        for _ in range(len(self.outvars) * len(self.everywhere) + 1):
            self._demand(wish, final)
            self.inputs = [self._input_groups(i, final) for i in range(len(self.invars))]
            wider = [
                given if given is not None else old | self._result_groups(j)
                for j, (old, given) in enumerate(zip(wish, self.out_groups, strict=True))
            ]
            if wider == wish:
                return wish
            wish = wider
        raise AssertionError("the groups that want a result grow without end")

    def _result_groups(self, j) -> Groups:
        """The groups that a result is wanted in, as far as its donor, the user's word or its shape tell."""
        v, donor = self.outvars[j], self.donors[j]
        if donor is not None:
            return self.inputs[donor]
        if not isinstance(v, compat.Literal) and v in self.placed:
            return self.placed[v]
        return frozenset() if getattr(v.aval, "shape", ()) else self.everywhere

    def _somewhere(self, v) -> Groups:
        if isinstance(v, compat.Literal):
            return frozenset([0])
        if v in self.invars:
            return self.inputs[self.invars.index(v)]
        for item, runs in zip(self.items, self.runs, strict=True):
            if isinstance(item, Loop):
                for acc in item.partition.accumulators:
                    if acc.result is v:
                        return frozenset([item.group(acc.place)])
            elif v in item.outvars:
                return runs
        raise AssertionError(f"{v} comes from nowhere")

    def _input_groups(self, i, final: bool) -> Groups:
        if (given := self.in_groups[i]) is not None:
            return given
        v = self.invars[i]
        returned = [j for j, d in enumerate(self.donors) if d == i]
        if returned and not getattr(v.aval, "shape", ()):
            return self.everywhere
        if found := frozenset(self.wanted.get(v, ())):
            return found
        for j in returned:
            if (given := self.out_groups[j]) is not None:
                return given
            v = self.outvars[j]
            pin = None if isinstance(v, compat.Literal) else self.held.of.get(v)
            if pin:
                return frozenset([min(pin)])
        return frozenset([0] if final else [])

    def _pin_loop_arguments(self):
        """An argument that loops read is where they read it: directly, or through equations that keep its size
        (casts). What else is made of it runs there, and only results cross.
        """
        wanted: dict[compat.Var, set[int]] = defaultdict(set)
        after: set[compat.Var] = set()
        before: list[compat.JaxprEqn] = []
        for item in self.items:
            if isinstance(item, Loop):
                after.update(acc.result for acc in item.partition.accumulators)
                for v, groups in item.needs().items():
                    wanted[v] |= groups
            elif any(v in after for v in equations.variables(item.invars)):
                after.update(item.outvars)
            else:
                before.append(item)
        for eqn in reversed(before):
            groups = set().union(*(wanted[v] for v in eqn.outvars))
            if eqn.primitive is place_p:
                groups = set(self.placed[eqn.outvars[0]])
            elif runs_once(eqn) and groups:
                groups = {min(groups)}  # it runs once, and its result is sent
            for v in equations.variables(eqn.invars):
                if equations.size(v.aval) < 2 * sum(equations.size(o.aval) for o in eqn.outvars):
                    wanted[v] |= groups
        for i, v in enumerate(self.invars):
            if self.in_groups[i] is None and wanted[v] and equations.size(v.aval) > 1:
                self.in_groups[i] = frozenset(wanted[v])

    def _pin(self):
        """Forward: the groups that hold an equation's operands; control flow over several groups is cut by them."""
        has_loop = any(isinstance(item, Loop) for item in self.items)
        text = None if has_loop else StageText.of(self.trace, len(self.everywhere))
        arguments = dict(zip(self.invars, self.in_groups, strict=True))
        self.held = held = Pins(len(self.everywhere), arguments, self.next_of, self.placed, text, self.items)
        donor_of = {v: a for a, v in self.next_of.items()}
        items, pins = [], []
        for item in self.items:
            if isinstance(item, Loop):
                for acc in item.partition.accumulators:
                    held.loop_result(acc.result, frozenset([item.group(acc.place)]))
                items.append(item)
                pins.append(None)
                continue
            for eqn, pin in pinned_parts(item, held, donor_of):
                items.append(eqn)
                pins.append(pin)
        if held.torn and not has_loop and text is None:
            pins = with_fewest_bytes(items, pins, held, self._said_of_results())
            for eqn, pin in zip(items, pins, strict=True):
                held.of.update((v, pin) for v in eqn.outvars)
        self.items, self.pins = items, pins

    def _said_of_results(self) -> dict[compat.Var, Groups]:
        """The groups of results that the user or the place of an argument says."""
        found = {}
        for v, given, donor in zip(self.outvars, self.out_groups, self.donors, strict=True):
            groups = given if given is not None or donor is None else self.in_groups[donor]
            if groups is not None and not isinstance(v, compat.Literal):
                found[v] = groups
        return found

    def committed(self) -> tuple[bool, ...]:
        """Per result, whether something that is placed says where it is."""
        found = []
        for j, v in enumerate(self.outvars):
            donor = self.donors[j]
            from_donor = donor is not None and self.in_groups[donor] is not None
            firm = isinstance(v, compat.Var) and v in self.held.firm
            found.append(self.out_groups[j] is not None or from_donor or firm)
        return tuple(found)

    def _demand(self, wish, final: bool):
        """Backward: the groups that want each variable, hence the groups that run each equation."""
        wanted: dict[compat.Var, set[int]] = defaultdict(set)
        for v, groups in zip(self.outvars, wish, strict=True):
            if not isinstance(v, compat.Literal):
                wanted[v] |= groups
        runs: list[Groups] = []
        for item, pin in zip(reversed(self.items), reversed(self.pins), strict=True):
            if isinstance(item, Loop):
                for v, groups in item.needs().items():
                    wanted[v] |= groups
                runs.append(frozenset())
                continue
            here = frozenset().union(*(wanted[v] for v in item.outvars))
            follows = bool(self.held.follows.intersection(item.outvars))
            groups = _where(item, pin, here, follows) if here or item.effects or final else frozenset()
            runs.append(groups)
            for v in equations.variables(item.invars):
                wanted[v] |= groups
        self.runs = runs[::-1]
        self.wanted = wanted

    # --- levels: what runs together ---------------------------------------------------------------

    def outline(self) -> Outline:
        instances, homes, loop_levels = self._levels()
        self._sink(instances, homes, loop_levels)
        return self._assemble(instances, homes, loop_levels)

    def _levels(self):
        """As early as possible: an instance (equation, group) -> level; a variable -> {group: level}."""
        homes: dict[compat.Var, dict[int, int]] = {
            v: dict.fromkeys(g, 0) for v, g in zip(self.invars, self.inputs, strict=True)
        }
        instances: dict[tuple[int, int], int] = {}
        loop_levels: dict[int, int] = {}
        floor = last_effect = 0

        def ready(v, group):
            have = homes[v]
            return have[group] if group in have else have[min(have)] + 1

        for i, item in enumerate(self.items):
            if isinstance(item, Loop):
                needs = item.needs()
                level = max([floor, *(ready(v, g) for v, groups in needs.items() for g in groups)]) + 1
                loop_levels[i], floor = level, level
                for acc in item.partition.accumulators:
                    homes[acc.result] = {item.group(acc.place): level + 1}
                continue
            for g in sorted(self.runs[i]):
                level = max((ready(v, g) for v in equations.variables(item.invars)), default=0)
                if compat.is_ordered(item):
                    level = last_effect = max(level, last_effect)
                while level in loop_levels.values():
                    level += 1
                instances[i, g] = level
                for v in item.outvars:
                    homes.setdefault(v, {})[g] = level
        return instances, homes, loop_levels

    def _sink(self, instances, homes, loop_levels):
        """As late as its readers allow, where that does not keep more bytes alive."""
        latest: dict[tuple[compat.Var, int], int] = {}

        def bound(v, group: int, level: int):
            have = homes[v]
            source = group if group in have else min(have)
            if source != group and level < _END:
                level -= 1
            latest[v, source] = min(latest.get((v, source), level), level)

        for v, groups in zip(self.outvars, self.out_placed, strict=True):
            if not isinstance(v, compat.Literal):
                for g in groups:
                    bound(v, g, _END)
        for i in reversed(range(len(self.items))):
            item = self.items[i]
            if isinstance(item, Loop):
                for v, groups in item.needs().items():
                    for g in groups:
                        bound(v, g, loop_levels[i] - 1)
                continue
            shrinks = sum(equations.nbytes(v.aval) for v in item.outvars) < sum(
                equations.nbytes(v.aval) for v in equations.variables(item.invars)
            )
            for g in self.runs[i]:
                limit = min((latest[v, g] for v in item.outvars if (v, g) in latest), default=_END)
                level = instances[i, g]
                if level < limit < _END and not (shrinks or runs_once(item)):
                    while limit in loop_levels.values():
                        limit -= 1
                    level = instances[i, g] = max(level, limit)
                    for v in item.outvars:
                        homes[v][g] = level
                for v in equations.variables(item.invars):
                    bound(v, g, level)

    def _assemble(self, instances, homes, loop_levels) -> Outline:
        by_segment: dict[tuple[int, int], list[int]] = defaultdict(list)
        for (i, g), level in sorted(instances.items()):
            by_segment[level, g].append(i)
        readers = self._readers(instances, loop_levels)
        packed = pack_scalars(self._transfers(homes, readers), readers, set(by_segment), set(loop_levels.values()))
        transfers = packed.transfers
        readers.update(packed.readers)
        sent = {(t.var, t.source) for t in transfers}
        names = self._names()
        items: list[Segment | Transfer | Loop] = [t for t in transfers if t.level < 0]
        levels = sorted(
            {level for level, _ in (*by_segment, *packed.first, *packed.last)}
            | {t.level for t in transfers if t.level >= 0}
            | set(loop_levels.values())
        )
        loops = {level: self.items[i] for i, level in loop_levels.items()}
        for level in levels:
            if level in loops:
                items.append(loops[level])
            for g in sorted(self.everywhere):
                own = [self.items[i] for i in by_segment.get((level, g), ())]
                eqns = (*packed.first.get((level, g), ()), *own, *packed.last.get((level, g), ()))
                if eqns:
                    items.append(self._segment(level, g, eqns, readers, sent))
            items += [t for t in transfers if t.level == level]
        for item in items:
            if isinstance(item, Segment):
                for v in item.writes:
                    names.setdefault(v, f"{item.name}.{item.writes.index(v)}")
            elif isinstance(item, Loop):
                for k, acc in enumerate(item.partition.accumulators):
                    names[acc.result] = f"loop{item.number}.{k}"
        num_consts = len(self.trace.consts)
        return Outline(
            self.trace,
            tuple(self.inputs),
            tuple(zip(self.outvars, self.out_placed, strict=True)),
            tuple(items),
            tuple(d if d is None else d - num_consts for d in self.donors),
            names,
            self.committed(),
            packed.sizes,
        )

    def _names(self):
        """Names of the arguments; no two alike, since values go by name in the program."""
        num_consts = len(self.trace.consts)
        names: dict = {}
        taken: set[str] = set()
        for i, v in enumerate(self.invars):
            name = f"const{i}" if i < num_consts else self.trace.in_names[i - num_consts]
            while name in taken:
                name += "'"
            taken.add(name)
            names[v] = name
        return names

    def _readers(self, instances, loop_levels):
        """For each variable and group, the levels at which it is read there (outputs: at the very end)."""
        readers: dict[tuple[compat.Var, int], set[int]] = defaultdict(set)
        for (i, g), level in instances.items():
            for v in equations.variables(self.items[i].invars):
                readers[v, g].add(level)
        for i, level in loop_levels.items():
            for v, groups in self.items[i].needs().items():
                for g in groups:
                    readers[v, g].add(level)
        for v, groups in zip(self.outvars, self.out_placed, strict=True):
            if not isinstance(v, compat.Literal):
                for g in groups:
                    readers[v, g].add(_END)
        return readers

    def _transfers(self, homes, readers) -> list[Transfer]:
        inputs = set(self.invars)
        found = []
        for v, g in readers:
            if g not in homes[v]:
                source = min(homes[v])
                level = -1 if v in inputs else homes[v][source]
                found.append(Transfer(v, source, g, level))
        order = {v: i for i, v in enumerate(homes)}
        return sorted(found, key=lambda t: (t.level, t.source, t.target, order[t.var]))

    def _segment(self, level, group, eqns, readers, sent) -> Segment:
        bound = {v for e in eqns for v in e.outvars}
        reads = tuple(v for v in equations.variables([v for e in eqns for v in e.invars]) if v not in bound)
        writes = tuple(
            v
            for e in eqns
            for v in equations.outputs(e)
            if (v, group) in sent or any(r != level for r in readers.get((v, group), ()))
        )
        # JAX gives the memory of donated arguments to results of their type in order: each result its predecessor's.
        next_of = {v: self.next_of[v] for v in reads if self.next_of.get(v) in writes}
        reads = tuple(dict.fromkeys((*next_of, *reads)))
        writes = tuple(dict.fromkeys((*next_of.values(), *writes)))
        return Segment(f"segment{level}.{group}", group, level, eqns, reads, writes)


def _checked_groups(eqn, everywhere: Groups) -> Groups:
    """The groups that a `place` names."""
    groups = eqn.params["groups"]
    if groups is None:
        return everywhere
    if wrong := sorted(groups - everywhere):
        raise StageError(
            f"place at {compat.source_line(eqn)}: group {wrong[0]} is not there; the mesh has groups"
            f" 0..{len(everywhere) - 1}."
        )
    return groups


def _where(eqn, pin: Groups | None, here: Groups, follows: bool) -> Groups:
    """The groups that run an equation outside of the loops."""
    if compat.is_ordered(eqn):
        return frozenset([0])  # in one group they keep their order
    if pin is None:
        if eqn.effects or runs_once(eqn):
            return frozenset([min(here, default=0)])
        return here or frozenset([0])
    if eqn.effects:
        return frozenset([min(pin & here or pin)])
    if here and not pin & here and follows:
        return here
    return pin & here or frozenset([min(pin)])
