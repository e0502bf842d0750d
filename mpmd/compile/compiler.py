"""Finds programs that are equal (equal stages, say), and compiles each once, with shardings in data-flow order.

The shardings of a program's inputs come from the user, from the program that made them, or (at the first use
of an argument) from XLA; its output shardings go to the next program. The whole step is never compiled as
one program. Equal programs are compiled once and loaded on the devices of each group that runs them.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mpmd import _jax_compat as compat
from mpmd.arrays.layouts import memory_kind, shortest
from mpmd.compile.executable import DistinctProgram, Executable, Parts, Threads, nbytes_on_a_device, on_mesh
from mpmd.compile.repeats import LEAST, BlockSite, block_of, common_blocks
from mpmd.compile.subprogram import Pattern, ReuseRule, Subprogram, num_equations
from mpmd.compile.updates import Instance, Update, apart, common_leaves, joined
from mpmd.errors import StageError
from mpmd.graphs import equations

CompilerOptions = Mapping[Any, Any]  # by name; or by stage, a mapping of the options of its tasks

_WORTH_A_CALL = 16  # the fewest equations of a program that others call, instead of compiling these equations again


class Compiler:
    """Compiles jaxprs for groups, each distinct jaxpr once. Counts the programs.

    Programs with shardings that are all known beforehand (groups of one device; Explicit axes) are compiled in
    parallel. If one of them contains another one of its family, it runs the smaller program, and only its other
    equations are compiled for it; every process decides alike. Programs that share long stretches without containing
    each other (stages of two and of three layers) run these stretches as separate programs. A program that only other
    processes run is compiled here only if its shardings are needed.

    Args:
      own: the meshes of this process's groups.
      others: a compiler for the same groups; its programs are reused.
    """

    def __init__(
        self,
        traced_on: AbstractMesh,
        own: Sequence[Mesh],
        options: CompilerOptions | None = None,
        others: "Compiler | None" = None,
    ):
        self.traced_on = traced_on
        self.options = options or {}
        self._of_all = {name: value for name, value in self.options.items() if isinstance(name, str)} or None
        self._own = {_shape(mesh): mesh for mesh in reversed(own)}
        self._is_own = set(own)
        self._threads = Threads()
        self._distinct: dict[Hashable, DistinctProgram] = {} if others is None else dict(others._distinct)
        self._waiting: dict[DistinctProgram, ReuseRule] = {}
        self._whole: dict[Hashable, list[tuple[Pattern, DistinctProgram]]] = defaultdict(list)
        self._kinds: dict[Hashable, int] = {}  # of equations
        self._patterns: dict[DistinctProgram, Pattern] = {}

    @property
    def num_programs(self) -> int:
        """The number of distinct programs, plus recompilations of programs that could not be loaded."""
        return self.num_compiled + self.num_stored

    @property
    def num_compiled(self) -> int:
        """The number of programs that were compiled, or found in JAX's cache after lowering."""
        return self._threads.num_compiled

    @property
    def num_stored(self) -> int:
        """The number of programs that an earlier process compiled; these were not even lowered."""
        return self._threads.num_stored

    @property
    def num_loaded(self) -> int:
        """How often a compiled program was loaded on further devices."""
        return self._threads.num_loaded

    def close(self) -> None:
        """Accepts no more programs; compilations under way are finished."""
        self._threads.close()

    def release(self) -> None:
        """Frees memory that is kept for loading on further devices: none are expected."""
        for distinct in self._distinct.values():
            distinct.release()

    def compile(
        self,
        name: str,
        family: str,
        closed: compat.ClosedJaxpr,
        mesh: Mesh,
        in_shardings: Sequence[NamedSharding | None],
        out_shardings: Sequence[NamedSharding | None],
        donate: Sequence[int] = (),
        reuse: ReuseRule | None = None,
        stage: int | None = None,
    ) -> Executable:
        """Compiles `closed` (traced on `traced_on`) for the group `mesh`; this may wait for `start`.

        Args:
          name: the name in HLO dumps and profiles. Equal programs have the name of the first.
          family: the program may run programs of this family as parts, if `reuse` allows it.
          in_shardings, out_shardings: None lets XLA choose.
          reuse: when the program may run another one as a part; None: never.
          stage: the stage of a task, which may have its own options; None for other programs.
        """
        options = self._of_all
        if stage in self.options:
            options = (options or {}) | self.options[stage]
            family = f"{family} {sorted(options.items())}"
        is_rebased = mesh.abstract_mesh != self.traced_on
        if is_rebased:
            closed = self._rebased(name, closed, mesh)
        replicated = NamedSharding(mesh, PartitionSpec())
        ins = [s or _typed(v.aval, mesh) for s, v in zip(in_shardings, closed.jaxpr.invars, strict=True)]
        outs = [s or _typed(v.aval, mesh) for s, v in zip(out_shardings, closed.jaxpr.outvars, strict=True)]
        if not any(ins) and not any(outs):
            ins, outs = ([replicated, *ins[1:]], outs) if ins else (ins, [replicated for _ in outs])
        distinct, is_new = self._find(name, family, options, closed, mesh, ins, outs, donate)
        if is_new and not is_rebased:
            rebased = self._rebased(name, closed, mesh)
            distinct.program = dataclasses.replace(distinct.program, closed=rebased)
        if any(s is None for s in (*ins, *outs)):
            distinct.start(self._own.get(_shape(mesh), mesh))
            compiled = distinct.on(next(iter(distinct.loaded)))
            ins, outs = compiled.input_shardings[0], compiled.output_shardings
        elif is_new and reuse is not None:
            self._waiting[distinct] = reuse
        if mesh in self._is_own and distinct not in self._waiting:
            distinct.start(mesh)
        ins, outs = (tuple(on_mesh(mesh, s) for s in shardings) for shardings in (ins, outs))
        return Executable(name, mesh, distinct, ins, outs)

    def fuse(self, name: str, first: Executable, second: Executable) -> Executable | None:
        """Fuses two programs of a group: arguments and results of the first, then of the second.

        Returns None if their options differ. Where one of them runs in parts, the inner parts become one program, with
        the other parts before and after it, so that it rounds like the separate programs.
        """
        mesh = first.mesh
        if first.compiled.program.options != second.compiled.program.options:
            return None
        ins = *first.in_shardings, *second.in_shardings
        outs = *first.out_shardings, *second.out_shardings
        fused = self._fused(name, first.compiled, second.compiled, mesh, ins, outs)
        if mesh in self._is_own:
            fused.start(mesh)
        return Executable(name, mesh, fused, ins, outs)

    def chain(
        self,
        name: str,
        halves: Sequence[Executable],
        num_args: int,
        takes: Sequence[Sequence[int]],
        results: Sequence[int],
    ) -> Executable:
        """Combines two programs of a group that run one after the other. Compiles nothing.

        Args:
          takes, results: positions of the arguments of each half, and of the results of the whole. They count the
            `num_args` arguments of the whole, then the results of the first half, then of the second.
        """
        mesh, programs = halves[0].mesh, [half.compiled for half in halves]
        closed = _joined(name, [p.program.closed for p in programs], takes, num_args, results)
        at: dict[int, NamedSharding] = {}
        begin = num_args
        for half, taken in zip(halves, takes, strict=True):
            at = dict(zip(taken, half.in_shardings, strict=True)) | at
            at |= dict(enumerate(half.out_shardings, begin))
            begin += len(half.out_shardings)
        donate = sorted(takes[h][i] for h, half in enumerate(programs) for i in half.program.donate)
        ins, outs = [at[i] for i in range(num_args)], [at[i] for i in results]
        family, options = "".join(p.family for p in programs), programs[0].program.options
        chain, is_new = self._find(name, family, options, closed, mesh, ins, outs, donate)
        if is_new:
            first = dict(enumerate(programs[0].jaxpr.outvars, num_args))
            handed = set(takes[1]).intersection(first).difference(results)
            nbytes = sum(nbytes_on_a_device(first[i], at[i]) for i in handed)
            chain.parts = Parts(tuple(programs), tuple(map(tuple, takes)), tuple(results), 0, nbytes)
        if mesh in self._is_own:
            chain.start(mesh)
        return Executable(name, mesh, chain, tuple(ins), tuple(outs))

    def start(self) -> None:
        """Begins to compile the programs since the last `start`, the largest first."""
        waiting, self._waiting = self._waiting, {}
        ascending = sorted(waiting, key=lambda d: num_equations(d.jaxpr))
        self._share_leaves([d for d in ascending if waiting[d].by_leaves])
        for distinct in ascending:
            if distinct.parts is None:
                self._reuse(distinct, waiting[distinct])
        self._share_blocks([d for d in ascending if not waiting[d].independent])
        for distinct in reversed(ascending):
            if (mesh := distinct.program.mesh) in self._is_own:
                distinct.start(mesh)
        self._patterns.clear()

    def _find(
        self,
        name: str,
        family: str,
        options: dict[str, object] | None,
        closed: compat.ClosedJaxpr,
        mesh: Mesh,
        ins: Sequence[NamedSharding | None],
        outs: Sequence[NamedSharding | None],
        donate: Sequence[int],
    ) -> tuple[DistinctProgram, bool]:
        """Returns the distinct program, and whether it is new."""
        key = (
            compat.jaxpr_key(closed), _where(mesh),
            tuple(map(_spec, ins)), tuple(map(_spec, outs)), tuple(donate), repr(options),
        )  # fmt: skip
        found = self._distinct.get(key)
        if found is None:
            # The program keeps `closed` alive: keys contain identities of its constants.
            program = compat.XlaProgram(name, closed, mesh, tuple(ins), tuple(outs), tuple(donate), options)
            self._distinct[key] = found = DistinctProgram(self._threads, program, family)
            return found, True
        if mesh in self._is_own and found.program.mesh not in self._is_own:
            found.program = dataclasses.replace(found.program, mesh=mesh)
        return found, False

    def _rebased(self, name: str, closed: compat.ClosedJaxpr, mesh: Mesh) -> compat.ClosedJaxpr:
        """Returns `closed` on the group's abstract mesh, without any devices."""
        try:
            return compat.rebase(closed, mesh.abstract_mesh, self.traced_on, is_last=True)
        except ValueError as e:
            raise StageError(
                f"{name} does not fit the group's mesh {dict(mesh.shape)}; the step was traced on"
                f" {dict(self.traced_on.shape)}.\n  {e}\n"
                "  Groups that run a stage need the mesh axes that the stage names."
            ) from None

    def _fused(
        self,
        name: str,
        first: DistinctProgram,
        second: DistinctProgram,
        mesh: Mesh,
        ins: Sequence[NamedSharding | None],
        outs: Sequence[NamedSharding | None],
    ) -> DistinctProgram:
        begin, num_args = len(first.jaxpr.invars), len(ins)
        takes, results = (range(begin), range(begin, num_args)), range(num_args, num_args + len(outs))
        closed = _joined(name, [first.program.closed, second.program.closed], takes, num_args, results)
        donate = [*first.program.donate, *(begin + i for i in second.program.donate)]
        family, options = first.family + second.family, first.program.options
        fused, is_new = self._find(name, family, options, closed, mesh, ins, outs, donate)
        if is_new and (first.parts or second.parts):
            fused.parts = self._fused_parts(f"{name}_inner", first, second, mesh)
        return fused

    def _fused_parts(self, name: str, first: DistinctProgram, second: DistinctProgram, mesh: Mesh) -> Parts:
        """Returns the parts before both inner programs, these two as one program, and the parts after them."""
        halves = [d.parts or Parts.whole(d) for d in (first, second)]
        num_args = [len(d.jaxpr.invars) for d in (first, second)]
        at = [list(range(num_args[0])), list(range(num_args[0], sum(num_args)))]  # where each half's values are
        inner = [half.programs[half.inner] for half in halves]
        ins = [s for d in inner for s in d.program.in_shardings]
        outs = [s for d in inner for s in d.program.out_shardings]
        order = [[(h, k)] for h, half in enumerate(halves) for k in range(half.inner)]
        order += [[(0, halves[0].inner), (1, halves[1].inner)]]
        order += [[(h, k)] for h, half in enumerate(halves) for k in range(half.inner + 1, len(half.programs))]
        programs, takes = [], []
        for members in order:
            alone = halves[members[0][0]].programs[members[0][1]]
            programs.append(alone if len(members) == 1 else self._fused(name, inner[0], inner[1], mesh, ins, outs))
            takes.append(tuple(at[h][i] for h, k in members for i in halves[h].takes[k]))
            for h, k in members:
                begin = sum(map(len, at))
                at[h] += range(begin, begin + len(halves[h].programs[k].jaxpr.outvars))
        results = tuple(at[h][i] for h, half in enumerate(halves) for i in half.results)
        position = sum(half.inner for half in halves)
        return Parts(tuple(programs), tuple(takes), results, position, sum(half.nbytes for half in halves))

    # --- programs in parts ------------------------------------------------------------------------

    def _reuse(self, distinct: DistinctProgram, reuse: ReuseRule) -> None:
        """Divides `distinct` by a known program that it contains, or else offers it to later programs."""
        pattern = self._pattern(distinct)
        if pattern.size < _WORTH_A_CALL or distinct.program.closed.consts:
            return
        known = self._whole[distinct.family, _where(distinct.program.mesh)]
        if not self._divide(distinct, known, reuse.independent):
            known.append((pattern, distinct))

    def _share_blocks(self, programs: Sequence[DistinctProgram]) -> None:
        """Makes programs of a family run a stretch that they share as a separate program."""
        families: dict[Hashable, list[DistinctProgram]] = defaultdict(list)
        for distinct in programs:
            families[distinct.family, _where(distinct.program.mesh)].append(distinct)
        for family in families.values():
            wholes = _undivided(family)
            patterns = [self._pattern(distinct) for distinct in wholes]
            for spans in common_blocks(patterns) if len(patterns) > 1 else ():
                whole = wholes[patterns.index(spans[0].pattern)]
                block = self._block(whole, spans)
                divided = [d for d in _undivided(family) if block and self._divide(d, [block], independent=False)]
                if len(divided) == 1:  # a block with one caller saves nothing
                    divided[0].parts = None

    def _block(self, whole: DistinctProgram, spans: Sequence[BlockSite]) -> tuple[Pattern, DistinctProgram] | None:
        """Makes a program of the first of equal stretches, which is in `whole`; None if a sharding is not known."""
        program, block = whole.program, block_of(spans)
        shardings = whole.shardings
        ins, outs = (
            [shardings[v] if v in shardings else _typed(v.aval, program.mesh) for v in vs]
            for vs in (block.reads, block.writes)
        )
        if any(s is None for s in (*ins, *outs)):
            return None
        free = {whole.jaxpr.invars[i] for i in program.donate}.difference(spans[0].wanted)
        donate = [i for i, v in enumerate(block.reads) if v in free]
        name = f"{program.name}_block"
        closed = compat.with_new_vars(compat.make_jaxpr(block.reads, block.writes, block.eqns, name))
        distinct, _ = self._find(name, whole.family, program.options, closed, program.mesh, ins, outs, donate)
        return self._pattern(distinct), distinct

    def _divide(
        self, distinct: DistinctProgram, known: Sequence[tuple[Pattern, DistinctProgram]], independent: bool
    ) -> bool:
        """Makes `distinct` run one of `known` as a part, if it contains one. Divides the other parts likewise."""
        pattern = self._pattern(distinct)
        for other, inner in sorted(known, key=lambda k: k[0].size, reverse=True):
            is_worth_it = 2 * other.size >= pattern.size or other.size >= LEAST
            cut = pattern.cut(other) if is_worth_it and inner is not distinct else None
            if cut is not None and (cut.is_independent or not independent):
                distinct.parts = self._parts(distinct, cut.pieces, {cut.inner: inner}, cut.inner)
            if distinct.parts is not None:
                for rest in _undivided(part for part in distinct.parts.programs if part is not inner):
                    self._divide(rest, known, independent)
                return True
        return False

    def _pattern(self, distinct: DistinctProgram) -> Pattern:
        if distinct not in self._patterns:
            self._patterns[distinct] = Pattern(distinct.jaxpr, self._kinds)
        return self._patterns[distinct]

    def _parts(
        self,
        whole: DistinctProgram,
        pieces: Sequence[Subprogram],
        given: Mapping[int, DistinctProgram],
        inner: int = 0,
    ) -> Parts | None:
        """Returns the parts to run `whole` as; None if a part has other shardings, or donates a value that is live.

        Args:
          given: by position, the programs of pieces that exist already.
          inner: as in `Parts`.
        """
        program, arguments, results = whole.program, whole.jaxpr.invars, whole.jaxpr.outvars
        shardings = whole.shardings
        free = {arguments[i] for i in program.donate}
        last = {v: k for k, piece in enumerate(pieces) for v in piece.reads}
        for k, distinct in given.items():
            known = (*distinct.program.in_shardings, *distinct.program.out_shardings)
            for v, s in zip((*pieces[k].reads, *pieces[k].writes), known, strict=True):
                if _spec(shardings.setdefault(v, s)) != _spec(s):
                    return None
            for v in (pieces[k].reads[i] for i in distinct.program.donate):
                if last[v] != k or v in results or (v in arguments and v not in free):
                    return None
        programs = []
        for k, piece in enumerate(pieces):
            if k in given:
                programs.append(given[k])
                continue
            for v in (*piece.reads, *piece.writes):
                if v not in shardings:
                    shardings[v] = _typed(v.aval, program.mesh)
            ins, outs = [shardings[v] for v in piece.reads], [shardings[v] for v in piece.writes]
            if any(s is None for s in (*ins, *outs)):
                return None
            donate = [i for i, v in enumerate(piece.reads) if v in free and last[v] == k]
            name = f"{program.name}_{'before' if k < min(given) else 'after'}"
            closed = compat.make_jaxpr(piece.reads, piece.writes, piece.eqns, name)
            found, _ = self._find(name, whole.family, program.options, closed, program.mesh, ins, outs, donate)
            programs.append(found)
        position = {v: i for i, v in enumerate((*arguments, *(v for piece in pieces for v in piece.writes)))}
        between = {v for piece in pieces for v in piece.writes}.difference(results)
        return Parts(
            tuple(programs),
            tuple(tuple(position[v] for v in piece.reads) for piece in pieces),
            tuple(position[v] for v in results),
            inner,
            sum(nbytes_on_a_device(v, shardings[v]) for v in between),
        )

    # --- updates by leaves ------------------------------------------------------------------------

    def _share_leaves(self, programs: Sequence[DistinctProgram]) -> None:
        """Makes updates run the work that they share, on many leaves, as separate programs."""
        updates: dict[Hashable, list[tuple[DistinctProgram, Update]]] = defaultdict(list)
        for distinct in programs:
            update = self._update(distinct) if self._pattern(distinct).can_be_cut else None
            if update is not None:
                updates[_where(distinct.program.mesh)].append((distinct, update))
        for alike in updates.values():
            wholes = [distinct for distinct, _ in alike]
            shared: list[list[tuple[Subprogram, DistinctProgram]]] = [[] for _ in alike]
            left, found = common_leaves([update for _, update in alike], wholes[0].program.mesh.size == 1)
            for instances in found:
                program = self._program_of_leaves(wholes[instances[0].number], instances)
                for instance in instances:
                    shared[instance.number].append((instance.piece, program))
            for (distinct, update), mine, rest in zip(alike, shared, left, strict=True):
                if mine and distinct not in (program for _, program in mine):  # it may be the shared program itself
                    last = joined([*rest, update.last], distinct.jaxpr.outvars)
                    pieces = [update.numbers, *(piece for piece, _ in mine), last]
                    given = {id(piece): program for piece, program in mine}
                    pieces = [piece for piece in pieces if piece.eqns or id(piece) in given]
                    at = {k: given[id(piece)] for k, piece in enumerate(pieces) if id(piece) in given}
                    distinct.parts = self._parts(distinct, pieces, at, min(at))

    def _update(self, distinct: DistinctProgram) -> Update | None:
        jaxpr, shardings = distinct.jaxpr, distinct.shardings

        def spec(v: compat.Var) -> Hashable:
            return _spec(shardings.get(v) or _typed(v.aval, distinct.program.mesh))

        return apart(jaxpr, spec, [jaxpr.invars[i] for i in distinct.program.donate])

    def _program_of_leaves(self, whole: DistinctProgram, instances: Sequence[Instance]) -> DistinctProgram:
        """Returns the program of the first of equal instances, which is in `whole`."""
        model, program, shardings = instances[0], whole.program, whole.shardings
        reads, writes = model.piece.reads, model.piece.writes
        begin = len(reads)
        results = range(begin, begin + len(writes))
        name = f"{program.name}_leaves"
        closed = _joined(name, [leaf.closed for leaf in model.leaves], model.takes, len(reads), results)
        ins, outs = ([shardings.get(v) or _typed(v.aval, program.mesh) for v in vs] for vs in (reads, writes))
        donate = sorted(taken[i] for leaf, taken in zip(model.leaves, model.takes, strict=True) for i in leaf.donate)
        return self._find(name, whole.family, program.options, closed, program.mesh, ins, outs, donate)[0]


def _joined(
    name: str,
    programs: Sequence[compat.ClosedJaxpr],
    takes: Sequence[Sequence[int]],
    num_args: int,
    results: Sequence[int],
) -> compat.ClosedJaxpr:
    """Joins programs into one; positions as in `Parts`."""
    at: dict[int, Any] = {}
    eqns: list[compat.JaxprEqn] = []
    begin = num_args
    for program, taken in zip(programs, takes, strict=True):
        jaxpr = compat.with_new_vars(program).jaxpr  # several programs may have the same cheap equation
        names = {v: at.setdefault(i, v) for i, v in zip(taken, jaxpr.invars, strict=True)}
        eqns += compat.renamed_equations(jaxpr.eqns, names)
        at |= {i: compat.renamed(v, names) for i, v in enumerate(jaxpr.outvars, begin)}
        begin += len(jaxpr.outvars)
    return compat.make_jaxpr([at[i] for i in range(num_args)], [at[i] for i in results], eqns, name)


def _undivided(programs: Iterable[DistinctProgram]) -> list[DistinctProgram]:
    """Returns the programs that `programs` run and that are not compiled yet, each once."""
    return list(dict.fromkeys(p for whole in programs for p in whole.runs if not p.is_started))


def _where(mesh: Mesh) -> Hashable:
    return _shape(mesh), mesh.devices.flat[0].platform


def _shape(mesh: Mesh) -> Hashable:
    return mesh.axis_names, mesh.devices.shape, mesh.axis_types


def _typed(aval: compat.Aval, mesh: Mesh) -> NamedSharding | None:
    """Returns the sharding that follows from a type alone: on one device, on Explicit axes, for scalars."""
    kind = compat.memory_kind(aval)
    if mesh.size == 1 or equations.size(aval) <= 1:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    typed = getattr(aval, "sharding", None)
    if typed is not None and all(t == AxisType.Explicit for t in (*mesh.axis_types, *typed.mesh.axis_types)):
        return NamedSharding(mesh, typed.spec, memory_kind=kind)
    return None


def _spec(sharding: NamedSharding | None) -> Hashable:
    return None if sharding is None else (str(shortest(sharding.spec)), memory_kind(sharding))
