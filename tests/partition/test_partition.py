"""Where each equation of a step runs, and what crosses between groups: a wrong place still gives right numbers.

Each small program below is of one kind. Its printed partition is compared with `tests/golden/partition/NAME.txt`,
and what must hold of it is asserted in code, whatever the print says. After a change of the partition that is meant,

    MPMD_UPDATE_GOLDEN=1 pytest tests/partition/test_partition.py

writes the files anew; read their diff. Nothing here is compiled: all arguments are abstract.
"""

import dataclasses
import difflib
import functools
import itertools
import os
import pathlib
from collections import Counter, defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpmd
import scheduler

UPDATE = bool(os.environ.get("MPMD_UPDATE_GOLDEN"))
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "partition"
IS_JAX_0_10 = jax.__version_info__ < (0, 11)

M, R = 4, 3  # microbatches, rows of one
WIDTHS = (5, 7, 11, 13, 2)  # of the batch and of each stage's output: every array has a size of its own
D, V = 8, 10  # width of equal stages; vocabulary
F32 = 4


# --- reading a partition --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A value that a task writes and another group reads: one transfer a microbatch."""

    source: str
    targets: tuple[str, ...]
    type: str
    nbytes: int


class Cut:
    """A step, cut: `mpmd.jit(step).lower(*args)`, and questions about it."""

    def __init__(self, step, args, num_groups):
        mesh = jax.make_mesh((num_groups,), ("stage",), devices=jax.devices()[:num_groups])
        lowered = mpmd.jit(step, mpmd_mesh=mpmd.MpmdMesh(mesh, "stage")).lower(*args)
        self.step, self.args = step, args
        self.outline = lowered._outline
        self.text = self._print(lowered)
        self.loop = self.outline.loops[0]

    def _print(self, lowered):
        names = self.outline.trace.in_names
        places = [f"{name} in {_groups(groups)}" for name, groups in zip(names, self.inputs, strict=True)]
        outs = [
            f"{n} in {_groups(g)}" for n, (_, g) in zip(self.outline.trace.out_names, self.outline.outputs, strict=True)
        ]
        return "\n".join([lowered.as_text(), "", *places, "", *outs, ""])

    @property
    def inputs(self):
        """The groups that hold each argument (captured constants left out)."""
        return self.outline.inputs[len(self.outline.trace.consts) :]

    def where(self, name):
        """The groups that hold the argument of that path."""
        return set(self.inputs[self.outline.trace.in_names.index(name)])

    def task(self, place, loop=None):
        """The task printed as `place`."""
        return next(t for t in (loop or self.loop).partition.tasks if str(t.place) == place)

    def group(self, place, loop=None):
        """The group that runs it."""
        return (loop or self.loop).group(self.task(place, loop).place)

    def matmuls(self, loop=None):
        """Matrix products per task, those in inner loops counted once; tasks without any left out."""
        return self.count("dot_general", loop)

    def count(self, primitive, loop=None):
        """Equations of that primitive per task; tasks without any left out."""
        counts = {str(t.place): _count(t.eqns, primitive) for t in (loop or self.loop).partition.tasks}
        return {place: n for place, n in counts.items() if n}

    def outside(self, primitive="dot_general"):
        """Equations of that primitive outside of the loops: a number per group."""
        counts = Counter()
        for segment in self.segments():
            counts[segment.group] += _count(segment.eqns, primitive)
        return {group: n for group, n in counts.items() if n}

    def segments(self):
        """What runs outside of the loops."""
        return [i for i in self.outline.items if hasattr(i, "eqns")]

    def transfers(self):
        """What crosses outside of the loops, once a step: (name, bytes, source, target)."""
        found = [i for i in self.outline.items if hasattr(i, "target")]
        return [(self.outline.names[t.var], _nbytes(t.var), t.source, t.target) for t in found]

    def crossings(self, loop=None):
        """What crosses in the loop, once a microbatch."""
        loop = loop or self.loop
        producer = {v: t.place for t in loop.partition.tasks for v in t.writes}
        readers = defaultdict(list)
        for t in loop.partition.tasks:
            for v in t.reads:
                if loop.group(t.place) != loop.group(producer[v]):
                    readers[v, loop.group(t.place)].append(str(t.place))
        return [
            Crossing(str(producer[v]), tuple(places), v.aval.str_short(short_dtypes=True), _nbytes(v))
            for (v, _), places in readers.items()
        ]

    def bytes_crossing(self, loop=None):
        """Bytes a microbatch from one task to another, by the task that reads them first: {"F0→F1": 96}."""
        sums = Counter()
        for c in self.crossings(loop):
            sums[f"{c.source}→{c.targets[0]}"] += c.nbytes
        return dict(sums)

    def residuals(self, place, loop=None):
        """Forward values that a backward task reads: the sizes in bytes, sorted."""
        producer = {v: t.place for t in (loop or self.loop).partition.tasks for v in t.writes}
        return sorted(_nbytes(v) for v in self.task(place, loop).reads if producer[v].kind == "F")

    def accumulated(self, place, loop=None):
        """Types that a task accumulates, sorted."""
        partition = (loop or self.loop).partition
        types = [
            partition.accumulators[k].value.aval.str_short(short_dtypes=True)
            for k in self.task(place, loop).accumulates
        ]
        return sorted(types)

    def body(self, place, loop=None):
        """A task's equations with variables numbered: equal for tasks that compile to one executable."""
        task = self.task(place, loop)
        partition = (loop or self.loop).partition
        numbers = {}

        def atoms(vs):
            return [
                f"{v.val}" if hasattr(v, "val") else (numbers.setdefault(v, len(numbers)), v.aval.str_short())
                for v in vs
            ]

        def equations(eqns):
            return [
                (e.primitive.name, atoms(e.invars), atoms(e.outvars), [equations(j.eqns) for j in _inner(e)])
                for e in eqns
            ]

        results = atoms(partition.accumulators[k].value for k in task.accumulates)
        return equations(task.eqns), atoms(task.writes), results

    def effects(self):
        """Equations with an effect, per task; tasks without any left out."""
        counts = {str(t.place): sum(bool(e.effects) for e in t.eqns) for t in self.loop.partition.tasks}
        return {place: n for place, n in counts.items() if n}

    def total(self, primitive):
        """Equations of that primitive in all tasks and outside of the loops."""
        return sum(sum(self.count(primitive, loop).values()) for loop in self.outline.loops) + sum(
            self.outside(primitive).values()
        )

    def moved(self):
        """The bytes of what is larger than a scalar among `transfers`, as (bytes, source, target)."""
        found = [i for i in self.outline.items if hasattr(i, "target")]
        return [(_nbytes(t.var), t.source, t.target) for t in found if _nbytes(t.var) > F32 and not _is_packed(t.var)]

    def plain(self, primitive):
        """Equations of that primitive in the step as it is written, without any pipeline."""
        return _count(self._plain_equations, primitive)

    @functools.cached_property
    def _plain_equations(self):
        return _live(jax.make_jaxpr(self.step)(*self.args).jaxpr)


def _is_packed(v):
    """Whether a value is a vector of packed scalars."""
    return str(v.aval.dtype) == "uint32" and v.aval.ndim == 1


def _groups(groups):
    return f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, sorted(groups)))}"


def _nbytes(v):
    if jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key):
        return v.aval.size * 8
    return v.aval.size * v.aval.dtype.itemsize


def _inner(eqn):
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                yield x


def _count(eqns, primitive):
    return sum((e.primitive.name == primitive) + sum(_count(_live(j), primitive) for j in _inner(e)) for e in eqns)


def _live(jaxpr):
    needed, kept = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(id(v) in needed for v in eqn.outvars):
            needed.update(map(id, eqn.invars))
            kept.append(eqn)
    return kept


# --- programs -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A step and its abstract arguments."""

    build: Callable
    num_groups: int


PROGRAMS: dict[str, Program] = {}


def program(build=None, *, num_groups=4):
    """Registers a function that returns `(step, args)` under its name."""
    if build is None:
        return functools.partial(program, num_groups=num_groups)
    PROGRAMS[build.__name__] = Program(build, num_groups)
    return build


@functools.cache
def cut(name) -> Cut:
    """The program of that name, cut."""
    p = PROGRAMS[name]
    return Cut(*p.build(), p.num_groups)


def array(*shape, dtype=jnp.float32):
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def mark(x):
    return mpmd.mark_stage_end(x)


def dense(w, x):
    return jnp.tanh(x @ w)


def squared_error(prediction, target):
    return jnp.mean((prediction - target) ** 2)


def tapered_weights():
    return [array(n, m) for n, m in itertools.pairwise(WIDTHS)]


def tapered_batch():
    return {"x": array(M, R, WIDTHS[0]), "y": array(M, R, WIDTHS[-1])}


def equal_weights(num=4):
    return [array(D, D) for _ in range(num)]


def equal_batch():
    return {"x": array(M, R, D), "y": array(M, R, D)}


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def training(loss, params, batch, schedule=None, update=sgd, has_aux=False):
    """A step of gradient descent by a pipelined loop, and its arguments."""
    schedule = schedule or scheduler.OneFOneB(4)

    def step(params, batch):
        def one(microbatch):
            return jax.value_and_grad(loss, has_aux=has_aux)(params, microbatch)

        value, grads = mpmd.treduce(one, batch, schedule=schedule)
        return update(params, grads), value

    return step, (params, batch)


def tapered_loss(params, batch):
    """A chain of four stages, whose arrays differ in size."""
    x = batch["x"]
    for stage, w in enumerate(params):
        x = dense(w, x if stage == 0 else mark(x))
    return squared_error(x, batch["y"])


def equal_loss(params, batch):
    """A chain of equal stages."""
    x = batch["x"]
    for stage, w in enumerate(params):
        x = dense(w, x if stage == 0 else mark(x))
    return squared_error(x, batch["y"])


@program
def chain():
    return training(tapered_loss, tapered_weights(), tapered_batch())


@program
def equal_stages():
    return training(equal_loss, equal_weights(), equal_batch())


@program
def hoisted():
    """A low-rank weight (a product of two parameters), a table made from an argument, and a causal mask."""
    params = {"w": equal_weights(), "a": array(D, 2), "b": array(2, D)}
    batch = equal_batch() | {"scale": array(M)}

    def step(params, basis, batch):
        def loss(params, batch):
            table = basis @ basis.T
            low_rank = params["a"] @ params["b"]
            x = dense(params["w"][0], batch["x"] + table[:R]) * batch["scale"]
            x = dense(params["w"][1] + low_rank, mark(x))
            x = dense(params["w"][2], mark(x) + table[:R])
            causal = jnp.arange(R)[:, None] >= jnp.arange(D)[None]
            return squared_error(dense(params["w"][3], mark(x)) * causal, batch["y"])

        value, grads = mpmd.treduce(
            lambda mb: jax.value_and_grad(loss)(params, mb), batch, schedule=scheduler.OneFOneB(4)
        )
        return sgd(params, grads), value

    return step, (params, array(D, D), batch)


@program
def stage_zero():
    """The implied entry mark: an embedding, what reads its result or its weights without passing a mark, and
    encoders of labels with weights of their own.
    """
    params = {"embedding": array(V, D), "w": equal_weights(3), "labels": array(5, D), "context": array(6, D)}
    batch = {
        "tokens": array(M, R, dtype=jnp.int32), "other": array(M, R, D), "y": array(M, R, 5), "c": array(M, R, 6),
    }  # fmt: skip

    def loss(params, batch):
        embedded = params["embedding"][batch["tokens"]]
        probe = jnp.mean(jnp.tanh(batch["other"] @ params["embedding"].T))  # reads a parameter of stage 0
        spread = jnp.mean(jnp.tanh(embedded @ embedded.T))  # reads a value of stage 0
        labels = jnp.tanh(batch["y"] @ params["labels"])  # only the last stage reads it
        context = jnp.tanh(batch["c"] @ params["context"])  # only stages 1 and 2 read it
        x = dense(params["w"][0], mark(embedded)) * context
        x = dense(params["w"][1], mark(x)) + context
        x = dense(params["w"][2], mark(x))
        return squared_error(x, labels) + probe + spread, {"probe": probe, "spread": spread}

    return training(loss, params, batch, has_aux=True)


@program
def labels_masks_positions_keys():
    """What has neither mark nor parameter: a mask and one-hot labels (cheap), positions of packed documents (a running
    sum), pairwise similarities of labels (a matrix product), and the parts of a key.
    """
    batch = {
        "x": array(M, R, D), "tokens": array(M, R, dtype=jnp.int32), "y": array(M, R, dtype=jnp.int32),
        "features": array(M, R, 20), "key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), M)),
    }  # fmt: skip

    def loss(params, batch):
        mask = (batch["tokens"] > 0)[:, None]
        keys = jax.random.split(batch["key"], 4)
        similar = batch["features"] @ batch["features"].T
        positions = jnp.cumsum(batch["tokens"])[:, None]
        x = batch["x"]
        for stage, w in enumerate(params):
            x = dense(w, x if stage == 0 else mark(x)) * mask
            x = x + 0.1 * jax.random.normal(keys[stage], (R, D))
            if stage in (1, 3):
                x = similar * 0.1 @ x
            if stage in (1, 2):
                x = x + jnp.sin(positions * 0.5)
        chosen = jax.nn.log_softmax(x) * jax.nn.one_hot(batch["y"], D)
        return -jnp.mean(chosen)

    return training(loss, equal_weights(), batch)


def _head(num_marks):
    params = {"w": tapered_weights()[:3], "head": array(WIDTHS[3], WIDTHS[4])}

    def loss(params, batch):
        x = batch["x"]
        for w in params["w"]:
            x = mark(dense(w, x))
        x = jnp.tanh(x)
        if num_marks == 4:
            x = mark(x)
        return squared_error(x @ params["head"], batch["y"])

    return training(loss, params, tapered_batch())


@program
def one_mark_less_than_stages():
    return _head(3)


@program
def as_many_marks_as_stages():
    return _head(4)


@program
def early_exit():
    """A trained head and a loss in stage 1, on the value before its mark."""
    params = {"w": tapered_weights(), "exit": array(WIDTHS[2], WIDTHS[4])}

    def loss(params, batch):
        w = params["w"]
        first = dense(w[1], mark(dense(w[0], batch["x"])))
        early = squared_error(first @ params["exit"], batch["y"])
        x = dense(w[3], mark(dense(w[2], mark(first))))
        return squared_error(x, batch["y"]) + 0.3 * early

    return training(loss, params, tapered_batch())


@program
def early_exit_in_stage_zero():
    """A trained head and a loss that depend on no mark."""
    params = {"w": tapered_weights(), "exit": array(WIDTHS[1], WIDTHS[4])}

    def loss(params, batch):
        w = params["w"]
        first = dense(w[0], batch["x"])
        early = squared_error(first @ params["exit"], batch["y"])
        x = dense(w[3], mark(dense(w[2], mark(dense(w[1], mark(first))))))
        return squared_error(x, batch["y"]) + 0.3 * early

    return training(loss, params, tapered_batch())


@program
def scalar_parameter_in_stage_zero():
    """Stage 0 is a trained temperature and nothing else."""
    params = {"temperature": array(), "w": equal_weights(3)}

    def loss(params, batch):
        x = batch["x"] * params["temperature"]
        for w in params["w"]:
            x = dense(w, mark(x))
        return squared_error(x, batch["y"])

    return training(loss, params, equal_batch())


@program
def auxiliary_losses():
    """A loss in every stage, summed; the one of stage 0 depends on no mark."""

    def loss(params, batch):
        x, balance = batch["x"], 0.0
        for stage, w in enumerate(params):
            x = dense(w, x if stage == 0 else mark(x))
            balance += jnp.mean(jax.nn.softmax(x) ** 2)
        return squared_error(x, batch["y"]) + 0.01 * balance

    return training(loss, tapered_weights(), tapered_batch())


@program
def metrics():
    """Metrics of stages 0 and 2, of labels alone, and of each microbatch's gradients."""

    def step(params, batch):
        def loss(params, batch):
            first = dense(params[0], batch["x"])
            third = dense(params[2], mark(dense(params[1], mark(first))))
            x = dense(params[3], mark(third))
            sizes = {"first": jnp.max(first, axis=0), "third": jnp.min(third, axis=0)}
            return squared_error(x, batch["y"]), sizes | {"positive": jnp.sum(batch["y"] > 0)}

        def one(microbatch):
            (value, sizes), grads = jax.value_and_grad(loss, has_aux=True)(params, microbatch)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
            return value, sizes | {"norm": norm}, grads

        operation = (
            mpmd.Mean,
            {"first": mpmd.Max, "third": mpmd.Min, "positive": mpmd.Add, "norm": mpmd.Concat},
            mpmd.Add,
        )
        value, sizes, grads = mpmd.treduce(one, batch, schedule=scheduler.OneFOneB(4), operation=operation)
        return sgd(params, grads), value, sizes

    return step, (tapered_weights(), tapered_batch())


@program
def split_backward():
    return training(tapered_loss, tapered_weights(), tapered_batch(), schedule=scheduler.ZeroBubbleH1(4))


@program
def split_backward_of_scans():
    """The scan over layers makes both gradients: it is divided into one in I and one in W."""
    return _scans(scheduler.ZeroBubbleH1(4))


@program
def metric_of_gradients_in_a_split_backward():
    """The norm over all stages of each microbatch's gradients."""

    def step(params, batch):
        def one(microbatch):
            value, grads = jax.value_and_grad(tapered_loss)(params, microbatch)
            return value, jnp.sqrt(sum(jnp.sum(g**2) for g in grads)), grads

        operation = (mpmd.Mean, mpmd.Max, mpmd.Add)
        value, norm, grads = mpmd.treduce(one, batch, schedule=scheduler.ZeroBubbleH1(4), operation=operation)
        return sgd(params, grads), value, norm

    return step, (tapered_weights(), tapered_batch())


@program
def clipping_in_a_split_backward():
    """Each microbatch's gradients are scaled by their norm before they are summed."""

    def step(params, batch):
        def one(microbatch):
            value, grads = jax.value_and_grad(tapered_loss)(params, microbatch)
            scale = lax.rsqrt(sum(jnp.sum(g**2) for g in grads))
            return value, [g * scale for g in grads]

        value, grads = mpmd.treduce(one, batch, schedule=scheduler.ZeroBubbleH1(4))
        return sgd(params, grads), value

    return step, (tapered_weights(), tapered_batch())


@program
def effects_in_a_split_backward():
    """A message in stage 1's forward, one in its backward, and one that only the weights' gradient would need."""

    @jax.custom_vjp
    def layer(w, x):
        return jnp.sin(x @ w)

    def backward(saved, g):
        w, x = saved
        g = g * jnp.cos(x @ w)
        jax.debug.print("gradient {}", jnp.max(g))
        weights = x.T @ g
        jax.debug.print("weights {}", jnp.max(weights))
        return weights, g @ w.T

    layer.defvjp(lambda w, x: (layer(w, x), (w, x)), backward)

    def loss(params, batch):
        x = mark(dense(params[0], batch["x"]))
        jax.debug.print("input {}", jnp.max(x))
        x = mark(layer(params[1], x))
        x = mark(dense(params[2], x))
        return squared_error(dense(params[3], x), batch["y"])

    return training(loss, tapered_weights(), tapered_batch(), schedule=scheduler.ZeroBubbleH1(4))


@program
def tied_with_a_split_backward():
    return _tied_embedding(scheduler.ZeroBubbleH1(4))


@program
def frozen_first_stage():
    def loss(params, batch):
        return tapered_loss([jax.lax.stop_gradient(params[0]), *params[1:]], batch)

    return training(loss, tapered_weights(), tapered_batch())


@program
def frozen_middle_stage():
    """The gradient goes through a stage whose weights have none."""

    def loss(params, batch):
        return tapered_loss([*params[:2], jax.lax.stop_gradient(params[2]), params[3]], batch)

    return training(loss, tapered_weights(), tapered_batch())


@program
def forward_only():
    def step(params, batch):
        return mpmd.treduce(
            lambda mb: tapered_loss(params, mb), batch, schedule=scheduler.OneFOneB(4), operation=mpmd.Mean
        )

    return step, (tapered_weights(), tapered_batch())


@program
def tied_embedding():
    """One array embeds in stage 0 and makes the logits in stage 3."""
    return _tied_embedding()


def _tied_embedding(schedule=None):
    params = {"embedding": array(V, D), "w": equal_weights(2)}
    batch = {"tokens": array(M, R, dtype=jnp.int32), "targets": array(M, R, dtype=jnp.int32)}

    def loss(params, batch):
        x = mark(jnp.tanh(params["embedding"][batch["tokens"]]))
        x = mark(dense(params["w"][0], x))
        x = mark(dense(params["w"][1], x))
        logits = x @ params["embedding"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][:, None], axis=1))

    return training(loss, params, batch, schedule=schedule)


@program
def tied_in_mixed_precision():
    """Tied, cast to bfloat16 in the loop's body, and scaled where it is used."""
    params = {"embedding": array(V, D), "w": equal_weights(2)}
    batch = {"tokens": array(M, R, dtype=jnp.int32), "y": array(M, R, V)}

    def loss(params, batch):
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = mark(jnp.tanh(params["embedding"][batch["tokens"]] * 3))
        x = mark(dense(params["w"][0], x))
        x = mark(dense(params["w"][1], x))
        return squared_error((x @ params["embedding"].T * 0.5).astype(jnp.float32), batch["y"])

    return training(loss, params, batch)


@program
def shared_by_all_stages():
    def loss(w, batch):
        return equal_loss([w] * 4, batch)

    return training(loss, array(D, D), equal_batch())


@program
def stacked_weights():
    """One array of all stages' weights."""

    def loss(w, batch):
        return equal_loss([w[stage] for stage in range(4)], batch)

    return training(loss, array(4, D, D), equal_batch())


@program
def stacked_and_split():
    """One array of all stages' weights, cut by one equation."""

    def loss(w, batch):
        return equal_loss([part[0] for part in jnp.split(w, 4)], batch)

    return training(loss, array(4, D, D), equal_batch())


@program
def stacked_and_indexed():
    """One array of all stages' weights, indexed by an array."""

    def loss(w, batch):
        return equal_loss([w[jnp.int32(stage)] for stage in range(4)], batch)

    return training(loss, array(4, D, D), equal_batch())


@program
def stacked_and_reshaped():
    """One array of eight layers' weights, reshaped to four stages of two."""

    def loss(w, batch):
        w, x = w.reshape(4, 2, D, D), batch["x"]
        for stage in range(4):
            x = x if stage == 0 else mark(x)
            x, _ = lax.scan(lambda h, layer: (dense(layer, h), None), x, w[stage])
        return squared_error(x, batch["y"])

    return training(loss, array(8, D, D), equal_batch())


@program
def shared_bias():
    """A bias, broadcast once and added in every stage: JAX sums the stages' gradients before it reduces them."""

    def loss(params, batch):
        bias = jnp.broadcast_to(params["bias"], (R, D))
        x = batch["x"]
        for stage, w in enumerate(params["w"]):
            x = dense(w, x if stage == 0 else mark(x)) + bias
        return squared_error(x, batch["y"])

    return training(loss, {"w": equal_weights(), "bias": array(D)}, equal_batch())


@program
def stacked_layers():
    """One array of eight layers' weights, two of which make a stage, as a scan over a slice."""

    def loss(w, batch):
        x = batch["x"]
        for stage in range(4):
            x = x if stage == 0 else mark(x)
            x, _ = lax.scan(lambda h, layer: (dense(layer, h), None), x, w[2 * stage : 2 * stage + 2])
        return squared_error(x, batch["y"])

    return training(loss, array(8, D, D), equal_batch())


def _skip(marked, schedule=None):
    def loss(params, batch):
        first = dense(params[0], batch["x"])
        after = mark(first)
        skip = after if marked else first
        x = dense(params[2], mark(dense(params[1], after)))
        return squared_error(dense(params[3], mark(x) + skip), batch["y"])

    return training(loss, equal_weights(), equal_batch(), schedule=schedule)


@program
def skip_before_the_mark():
    """Stage 3 reads what stage 0 made, taken before the mark."""
    return _skip(marked=False)


@program
def skip_after_the_mark():
    return _skip(marked=True)


@program(num_groups=2)
def two_stages_a_group():
    return training(tapered_loss, tapered_weights(), tapered_batch(), schedule=scheduler.InterleavedOneFOneB(4, 2))


@program(num_groups=2)
def skip_within_a_group():
    """Stages 0 and 3 share a group, folded like a V."""
    return _skip(marked=False, schedule=scheduler.ZeroBubbleV(2))


@program
def passed_through_marks():
    """A value of stage 0, an integer mask and the labels go through every mark, and only stage 3 reads them."""
    batch = {"x": array(M, R, D), "y": array(M, R, D), "kept": array(M, R, dtype=jnp.int32)}
    params = [array(D, D), array(D, 6), array(6, D), array(D, D)]

    def loss(params, batch):
        carried = {"x": dense(params[0], batch["x"]), "kept": batch["kept"], "y": batch["y"]}
        carried["skip"] = jnp.sin(carried["x"])[:, :5]
        for w in params[1:3]:
            carried = mark(carried)
            carried["x"] = dense(w, carried["x"])
        carried = mark(carried)
        x = dense(params[3], carried["x"]) * carried["kept"][:, None]
        x = x + jnp.sum(x[:, :5] * carried["skip"], axis=1, keepdims=True)
        return squared_error(x, carried["y"])

    return training(loss, params, batch)


@program
def checkpointed_stages():
    def loss(params, batch):
        x = batch["x"]
        for stage, w in enumerate(params):
            x = jax.checkpoint(lambda w, x: jnp.sin(dense(w, x)))(w, x if stage == 0 else mark(x))
        return squared_error(x, batch["y"])

    return training(loss, tapered_weights(), tapered_batch())


def _scans(schedule=None):
    num_layers = (3, 2, 2, 4)

    def loss(params, batch):
        x = batch["x"]
        for stage, w in enumerate(params):
            x, _ = lax.scan(lambda h, layer: (dense(layer, h), None), x if stage == 0 else mark(x), w)
        return squared_error(x, batch["y"])

    return training(loss, [array(n, D, D) for n in num_layers], equal_batch(), schedule=schedule)


@program
def scans():
    """Three, two, two and four layers a stage."""
    return _scans()


@program
def mixed_precision():
    """Parameters in float32, cast to bfloat16 in the loss; gradients accumulate in float32."""

    def loss(params, batch):
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = batch["x"].astype(jnp.bfloat16)
        for stage, w in enumerate(params):
            x = dense(w, x if stage == 0 else mark(x))
        return squared_error(x.astype(jnp.float32), batch["y"])

    return training(loss, tapered_weights(), tapered_batch())


@program
def dropout():
    """A key of the step, folded with the microbatch's index, and again with the stage's."""

    def step(params, key, batch):
        def loss(params, i):
            here = jax.random.fold_in(key, i)
            x = lax.dynamic_index_in_dim(batch["x"], i, keepdims=False)
            for stage, w in enumerate(params):
                x = dense(w, x if stage == 0 else mark(x))
                kept = jax.random.bernoulli(jax.random.fold_in(here, stage), 0.9, x.shape)
                x = jnp.where(kept, x / 0.9, 0)
            return squared_error(x, lax.dynamic_index_in_dim(batch["y"], i, keepdims=False))

        value, grads = mpmd.treduce_i(lambda i: jax.value_and_grad(loss)(params, i), M, schedule=scheduler.OneFOneB(4))
        return sgd(params, grads), value

    return step, (equal_weights(), jax.eval_shape(jax.random.key, 0), equal_batch())


@program
def clipped_by_global_norm():
    """After the loop: clipping, momentum with a warmup, and how far the parameters moved."""

    def step(state, batch):
        def one(microbatch):
            return jax.value_and_grad(tapered_loss)(state["params"], microbatch)

        value, grads = mpmd.treduce(one, batch, schedule=scheduler.OneFOneB(4))
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        scale = jnp.minimum(1.0, 1.0 / norm)
        rate = 0.1 * jnp.minimum(1.0, (state["count"] + 1) / 100)
        momentum = [0.9 * m + scale * g for m, g in zip(state["momentum"], grads, strict=True)]
        params = [p - rate * m for p, m in zip(state["params"], momentum, strict=True)]
        drift = sum(jnp.sum((new - old) ** 2) for new, old in zip(params, state["params"], strict=True))
        return {"params": params, "momentum": momentum, "count": state["count"] + 1}, (value, norm, drift)

    state = {"params": tapered_weights(), "momentum": tapered_weights(), "count": array(dtype=jnp.int32)}
    return step, (state, tapered_batch())


def _states(*names):
    """A training state: parameters, and as many arrays like them under each name."""
    return {name: equal_weights() for name in ("params", *names)} | {"count": array(dtype=jnp.int32)}


def _gradients(state, batch):
    def one(microbatch):
        return jax.value_and_grad(equal_loss)(state["params"], microbatch)

    return mpmd.treduce(one, batch, schedule=scheduler.OneFOneB(4))


@program
def steps_that_may_be_skipped():
    """A cond around clipping and momentum: no update where the norm is not finite."""

    def step(state, batch):
        value, grads = _gradients(state, batch)

        def update(state, grads):
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
            momentum = [0.9 * m + g / norm for m, g in zip(state["momentum"], grads, strict=True)]
            params = [p - 0.1 * m for p, m in zip(state["params"], momentum, strict=True)]
            return {"params": params, "momentum": momentum, "count": state["count"] + 1}

        return lax.cond(jnp.isfinite(value), update, lambda state, _: state, state, grads), value

    return step, (_states("momentum"), equal_batch())


@program
def gradients_of_several_steps():
    """A cond that adds gradients up in every step but each fourth, which updates."""

    def step(state, batch):
        value, grads = _gradients(state, batch)
        total = [a + g for a, g in zip(state["total"], grads, strict=True)]

        def update(params, total):
            return [p - 0.1 * t for p, t in zip(params, total, strict=True)], [0 * t for t in total]

        last = state["count"] % 4 == 3
        params, total = lax.cond(last, update, lambda params, total: (params, total), state["params"], total)
        return {"params": params, "total": total, "count": state["count"] + 1}, value

    return step, (_states("total"), equal_batch())


@program
def history_of_gradients():
    """A scan over stored gradients, projected out in turn, and over none: each iteration reads all groups."""

    def step(state, batch):
        value, grads = _gradients(state, batch)
        history = [jnp.roll(h, 1, 0).at[0].set(g) for h, g in zip(state["history"], grads, strict=True)]

        def project(direction, old):
            alpha = sum(jnp.vdot(d, o) for d, o in zip(direction, old, strict=True))
            return [d - alpha * o for d, o in zip(direction, old, strict=True)], alpha

        direction, alphas = lax.scan(project, grads, history)
        direction, nothing = lax.scan(project, direction, [h[:0] for h in history])
        params = [p - 0.1 * d for p, d in zip(state["params"], direction, strict=True)]
        return {"params": params, "history": history}, (value, alphas, nothing)

    return step, ({"params": equal_weights(), "history": [array(3, D, D)] * 4}, equal_batch())


@program
def orthogonal_updates():
    """One while loop over all gradients, each of which goes on by itself."""

    def step(params, iterations, batch):
        value, grads = _gradients({"params": params}, batch)
        grads = lax.fori_loop(0, iterations, lambda _, gs: [1.5 * g - 0.5 * g @ g.T @ g for g in gs], grads)
        return sgd(params, grads), value

    return step, (equal_weights(), array(dtype=jnp.int32), equal_batch())


@program
def weight_decay_in_the_loss():
    """The squares of all weights, which no microbatch changes."""

    def loss(params, batch):
        return tapered_loss(params, batch) + 0.01 * sum(jnp.sum(w**2) for w in params)

    return training(loss, tapered_weights(), tapered_batch())


@program
def norm_of_the_parameters():
    """A metric of all parameters, outside of the loop."""

    def step(params, batch):
        def one(microbatch):
            return jax.value_and_grad(tapered_loss)(params, microbatch)

        value, grads = mpmd.treduce(one, batch, schedule=scheduler.OneFOneB(4))
        return sgd(params, grads), (value, sum(jnp.sum(p**2) for p in params))

    return step, (tapered_weights(), tapered_batch())


@program
def two_loops():
    """Trains, then evaluates the new parameters, by another schedule."""

    def step(params, batch):
        def one(microbatch):
            return jax.value_and_grad(tapered_loss)(params, microbatch)

        value, grads = mpmd.treduce(one, batch, schedule=scheduler.OneFOneB(4))
        params = sgd(params, grads)
        after = mpmd.treduce(lambda mb: tapered_loss(params, mb), batch, schedule=scheduler.GPipe(4))
        return params, value, after

    return step, (tapered_weights(), tapered_batch())


@program
def custom_derivative():
    """A stage with a backward pass of its own, which holds a matrix product."""

    @jax.custom_vjp
    def layer(w, x):
        return jnp.sin(x @ w)

    def forward(w, x):
        return layer(w, x), (w, x)

    def backward(saved, g):
        w, x = saved
        g = g * jnp.cos(x @ w)
        return x.T @ g, g @ w.T

    layer.defvjp(forward, backward)

    def loss(params, batch):
        x = mark(dense(params[0], batch["x"]))
        x = mark(layer(params[1], x))
        x = mark(layer(params[2], x))
        return squared_error(layer(params[3], x), batch["y"])

    return training(loss, tapered_weights(), tapered_batch())


@program
def branches_and_loops():
    """A cond in stage 1, a fori_loop in stage 2."""

    def loss(params, batch):
        x = mark(dense(params[0], batch["x"]))
        x = mark(lax.cond(jnp.sum(x) > 0, lambda x: jnp.sin(x @ params[1]), lambda x: 2 * x, x))
        x = mark(lax.fori_loop(0, 3, lambda i, x: dense(params[2], x), x))
        return squared_error(dense(params[3], x), batch["y"])

    return training(loss, equal_weights(), equal_batch())


# --- all programs ---------------------------------------------------------------------------------

ALL = list(PROGRAMS)


@pytest.mark.parametrize("name", ALL)
def test_the_printed_partition_is_the_golden_one(name):
    check_golden(name, GOLDEN)


def check_golden(name, folder):
    path = folder / f"{name}.txt"
    head = f"jax {jax.__version__}\n\n"
    if UPDATE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + cut(name).text)
    assert path.exists(), f"no {path}: run with MPMD_UPDATE_GOLDEN=1"
    golden = path.read_text()
    if golden.splitlines()[0] != head.splitlines()[0]:
        pytest.skip(f"{path.name} was printed with {golden.splitlines()[0]}; other versions name equations otherwise")
    found = head + cut(name).text
    diff = "\n".join(difflib.unified_diff(golden.splitlines(), found.splitlines(), "golden", "found", lineterm=""))
    assert not diff, diff


def test_every_golden_file_has_its_program():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(ALL)


HEAVY = ["dot_general", "scan", "cond", "cumsum", "random_bits", "scatter-add"]
CUT_BY_GROUPS = {"steps_that_may_be_skipped", "gradients_of_several_steps", "history_of_gradients"}


@pytest.mark.parametrize("name", [name for name in ALL if name not in CUT_BY_GROUPS])
def test_nothing_heavy_is_computed_twice_or_lost(name):
    c = cut(name)
    found, plain = ({p: count(p) for p in HEAVY} for count in (c.total, c.plain))
    found["scan"] -= sum(_count(loop.partition.after, "scan") for loop in c.outline.loops)  # those of joined parts
    scans = c.count("scan")
    found["scan"] -= sum(n for place, n in scans.items() if place[0] == "W" and f"I{place[1:]}" in scans)  # divided
    assert found == plain


@pytest.mark.parametrize("name", ALL)
def test_a_backward_task_reads_forward_values_that_its_group_has_anyway(name):
    c = cut(name)
    tasks = c.loop.partition.tasks
    here = defaultdict(set)
    for t in tasks:
        if t.place.kind == "F":
            here[c.loop.group(t.place)].update(t.reads, t.writes)
    forward = {v for t in tasks if t.place.kind == "F" for v in t.writes}
    for t in tasks:
        if t.place.kind != "F":
            assert set(t.reads) & forward <= here[c.loop.group(t.place)], t.place


@pytest.mark.parametrize("name", ALL)
def test_forward_values_flow_down_and_gradients_flow_up(name):
    for loop in cut(name).outline.loops:
        producer = {v: t.place for t in loop.partition.tasks for v in t.writes}
        for t in loop.partition.tasks:
            for v in t.reads:
                source = producer[v]
                if t.place.kind == "F":
                    assert source.kind == "F" and source.stage < t.place.stage
                elif source.kind != "F":
                    assert source.stage >= t.place.stage


@pytest.mark.parametrize("name", ALL)
def test_every_value_that_a_task_writes_is_read_and_no_task_reads_its_own(name):
    for loop in cut(name).outline.loops:
        reads = [v for t in loop.partition.tasks for v in t.reads]
        for t in loop.partition.tasks:
            assert set(t.writes) <= set(reads)
            assert not set(t.writes) & set(t.reads)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_task_holds_nothing(name):
    for loop in cut(name).outline.loops:
        for t in loop.partition.tasks:
            if t.is_empty:
                assert not (t.eqns or t.reads or t.operands or t.uses_index), t.place


@pytest.mark.parametrize("name", ALL)
def test_state_comes_back_where_it_came_from(name):
    c = cut(name)
    if name == "forward_only":
        return
    leaves = jax.tree.leaves(c.args[0])
    results = [groups for _, groups in c.outline.outputs]
    assert c.inputs[: len(leaves)] == tuple(results[: len(leaves)])


# --- each program ---------------------------------------------------------------------------------


def f32(*shape):
    """Bytes of a float32 array."""
    return F32 * functools.reduce(lambda a, b: a * b, shape, 1)


def crossings(*forward, backward=None):
    """The bytes at the three boundaries, there and back."""
    backward = forward if backward is None else backward
    there = {f"F{s}→F{s + 1}": n for s, n in enumerate(forward)}
    return there | {f"B{s + 1}→B{s}": n for s, n in enumerate(backward)}


TAPERED = tuple(f32(R, n) for n in WIDTHS[1:4])
EQUAL = (f32(R, D),) * 3
CHAIN = {"F0": 1, "F1": 1, "F2": 1, "F3": 1, "B3": 2, "B2": 2, "B1": 2, "B0": 1}
ONE_GROUP_EACH = [{0}, {1}, {2}, {3}]


def test_a_chain_sends_each_boundary_once_there_and_once_back():
    c = cut("chain")
    assert c.matmuls() == CHAIN
    assert c.bytes_crossing() == crossings(*TAPERED)
    assert len(c.crossings()) == 6
    assert c.moved() == []
    assert [c.where(f"params[{s}]") for s in range(4)] == ONE_GROUP_EACH
    assert c.where("batch['x']") == {0}
    assert c.where("batch['y']") == {3}


def test_a_chain_keeps_inputs_and_outputs_of_its_layers_and_no_more():
    c = cut("chain")
    out = [f32(R, n) for n in WIDTHS]
    assert c.residuals("B0") == [out[1]]
    assert c.residuals("B1") == [out[1], out[2]]
    assert c.residuals("B2") == [out[2], out[3]]
    assert c.residuals("B3") == [out[4], out[4], out[3]]  # the input, the output, and the error


def test_each_gradient_accumulates_in_the_backward_of_its_stage():
    c = cut("chain")
    assert [c.accumulated(f"B{s}") for s in range(4)] == [[f"f32[{n},{m}]"] for n, m in itertools.pairwise(WIDTHS)]
    assert [c.accumulated(f"F{s}") for s in range(4)] == [[], [], [], ["f32[]"]]


@pytest.mark.parametrize("name", ["equal_stages", "scans"])
def test_equal_middle_stages_have_equal_bodies(name):
    c = cut(name)
    assert c.body("F1") == c.body("F2")
    assert c.body("B1") == c.body("B2")
    assert c.body("F0") != c.body("F1")


def test_what_no_microbatch_changes_is_computed_once_before_the_loop():
    c = cut("hoisted")
    assert c.outside() == {0: 1, 1: 1}  # the table, where its argument is; the low-rank weight, where it is used
    assert c.moved() == [(f32(D, D), 0, 2)]  # the table goes to its other reader
    assert c.matmuls() == CHAIN | {"B1": 4}  # and the gradients of the two factors
    assert c.bytes_crossing() == crossings(*EQUAL)
    assert c.where("params['a']") == c.where("params['b']") == {1}
    assert c.accumulated("B1") == ["f32[2,8]", "f32[8,2]", "f32[8,8]"]


def test_a_cheap_constant_is_made_again_where_it_is_read():
    c = cut("hoisted")
    assert c.count("iota") == {"F3": 2, "B3": 2}
    assert c.outside("iota") == {}


def test_stage_zero_has_an_implied_entry_mark():
    c = cut("stage_zero")
    assert c.count("gather") == {"F0": 1}
    assert c.count("scatter-add") == {"B0": 1}
    assert c.matmuls() == {"F0": 2, "F1": 2, "F2": 1, "F3": 2, "B3": 3, "B2": 2, "B1": 3, "B0": 3}
    assert c.where("params['embedding']") == c.where("batch['other']") == {0}
    assert c.accumulated("F0") == ["f32[]", "f32[]"]


def test_an_encoder_without_a_mark_runs_where_its_result_is_read():
    c = cut("stage_zero")
    assert c.where("params['labels']") == c.where("batch['y']") == {3}
    assert c.where("params['context']") == c.where("batch['c']") == {1}
    assert c.accumulated("B3") == ["f32[5,8]", "f32[8,8]"]
    assert c.accumulated("B1") == ["f32[6,8]", "f32[8,8]"]
    crossing = c.bytes_crossing()
    state = f32(R, D)
    assert crossing["F1→F2"] == 2 * state  # the context beside the activation
    assert crossing["F0→F3"] == 2 * F32  # the two auxiliary losses
    assert sum(n for pair, n in crossing.items() if pair.endswith("→B1")) == 2 * state
    assert sum(crossing.values()) == 4 * state + 2 * F32 + 4 * state


def test_a_view_of_a_residual_is_not_kept_beside_it():
    probe = [f32(R, V)]  # of the other rows against the vocabulary
    assert cut("stage_zero").residuals("B0") == sorted([f32(R, D), f32(R, R), *probe])


def test_what_mark_zero_needs_is_stage_zero_if_the_parameter_is_a_scalar_too():
    c = cut("scalar_parameter_in_stage_zero")
    assert c.bytes_crossing() == crossings(*EQUAL)
    assert c.accumulated("B0") == ["f32[]"]
    assert c.where("batch['x']") == {0}
    assert not c.task("F0").is_empty


def test_masks_labels_and_keys_are_made_again_by_each_reader():
    c = cut("labels_masks_positions_keys")
    everywhere = {0, 1, 2, 3}
    assert c.where("batch['tokens']") == c.where("batch['key']") == everywhere
    assert c.where("batch['y']") == {3}
    assert c.count("random_split") == {"F0": 1, "F1": 1, "F2": 1, "F3": 1}
    assert c.count("random_bits") == {"F0": 1, "F1": 1, "F2": 1, "F3": 1}  # the noise itself where it is used
    types = {x.type for x in c.crossings()}
    assert types == {"f32[3,8]", "f32[3,3]", "i32[3]"}


def test_what_is_dear_without_a_mark_is_computed_by_its_first_reader_and_sent_once():
    c = cut("labels_masks_positions_keys")
    assert c.matmuls() == CHAIN | {
        "F1": 3,
        "F3": 2,
        "B1": 3,
        "B3": 3,
    }  # the similarities in F1, their uses in F1 and F3
    assert c.count("cumsum") == {"F1": 1}
    state, similar, positions = f32(R, D), f32(R, R), F32 * R
    assert c.bytes_crossing() == crossings(state, state + positions, state, backward=EQUAL) | {"F1→F3": similar}
    assert c.where("batch['features']") == {1}


def test_cheap_labels_are_no_residuals():
    c = cut("labels_masks_positions_keys")
    state, similar = f32(R, D), f32(R, R)
    assert c.residuals("B0") == [state]
    assert c.residuals("B1") == [similar, state, state]
    assert c.residuals("B2") == [state, state]
    assert c.residuals("B3") == [F32 * R, similar, state, state, state]  # with the normaliser of the softmax


def test_a_mark_after_the_last_stage_changes_nothing():
    assert cut("one_mark_less_than_stages").text == cut("as_many_marks_as_stages").text


@pytest.mark.parametrize("name", ["one_mark_less_than_stages", "as_many_marks_as_stages"])
def test_what_follows_the_last_mark_is_in_the_last_stage(name):
    c = cut(name)
    assert c.matmuls() == CHAIN
    assert c.bytes_crossing() == crossings(*TAPERED)
    assert c.where("params['head']") == {3}
    assert c.accumulated("B3") == [f"f32[{WIDTHS[3]},{WIDTHS[4]}]"]
    assert c.residuals("B3") == [f32(R, WIDTHS[4]), f32(R, WIDTHS[3])]  # the error, and the head's input


@pytest.mark.parametrize(("name", "stage"), [("early_exit_in_stage_zero", 0), ("early_exit", 1)])
def test_an_early_exit_is_wholly_in_its_stage(name, stage):
    c = cut(name)
    width = WIDTHS[stage + 1]
    assert c.matmuls() == CHAIN | {f"F{stage}": 2, f"B{stage}": CHAIN[f"B{stage}"] + 2}
    assert c.bytes_crossing() == crossings(*TAPERED) | {f"F{stage}→F3": F32}  # the loss alone
    assert c.where("params['exit']") == {stage}
    assert c.where("batch['y']") == {stage, 3}
    assert f"f32[{width},{WIDTHS[4]}]" in c.accumulated(f"B{stage}")
    activations = [f32(R, n) for n in WIDTHS[max(stage, 1) : stage + 2]]
    assert c.residuals(f"B{stage}") == sorted([*activations, f32(R, WIDTHS[4])])  # and the exit's error


def test_auxiliary_losses_stay_in_their_stages_and_cross_as_scalars():
    c = cut("auxiliary_losses")
    assert c.matmuls() == CHAIN
    assert c.count("exp") == {f"F{s}": 1 for s in range(4)}
    assert c.bytes_crossing() == crossings(*(n + F32 for n in TAPERED), backward=TAPERED)
    assert len(c.crossings()) == 9
    for stage in range(4):
        own = f32(R, WIDTHS[stage + 1])
        residuals = [own] * 3 + [F32 * R]  # the activation, the softmax and its parts
        residuals += [f32(R, WIDTHS[stage])] * (stage > 0) + [own] * (stage == 3)
        assert c.residuals(f"B{stage}") == sorted(residuals)


def test_metrics_accumulate_in_the_stages_that_make_them():
    c = cut("metrics")
    assert c.accumulated("F0") == ["f32[7]"]
    assert c.accumulated("F2") == ["f32[13]"]
    assert c.accumulated("F3") == ["f32[]", "i32[]"]
    assert c.matmuls() == CHAIN
    assert c.moved() == []


def test_a_norm_of_all_gradients_crosses_as_scalars():
    c = cut("metrics")
    expected = crossings(*TAPERED)
    expected["B1→B0"] += F32
    assert c.bytes_crossing() == expected | {"B2→B0": F32, "B3→B0": F32}
    assert c.accumulated("B0") == ["f32[5,7]", "f32[]"]


def test_a_split_backward_makes_the_input_gradient_first():
    c = cut("split_backward")
    ones = ["F0", "F1", "F2", "F3", "I3", "I2", "I1", "W3", "W2", "W1", "W0"]
    assert c.matmuls() == dict.fromkeys(ones, 1)
    assert c.task("I0").is_empty
    assert c.bytes_crossing() == crossings(*TAPERED, backward=()) | {
        "I3→I2": TAPERED[2],
        "I2→I1": TAPERED[1],
        "I1→W0": TAPERED[0],
    }
    assert [c.accumulated(f"I{s}") for s in range(4)] == [[]] * 4
    assert [len(c.accumulated(f"W{s}")) for s in range(4)] == [1] * 4


def test_what_feeds_both_gradients_runs_once_and_is_handed_on():
    c = cut("split_backward")
    if IS_JAX_0_10:  # newer releases write the derivative of tanh otherwise
        assert c.count("sub") == {"F3": 1, "I3": 1, "I2": 1, "I1": 1, "W0": 1}
    for stage in (1, 2, 3):
        handed = set(c.task(f"W{stage}").reads) & set(c.task(f"I{stage}").writes)
        assert [v.aval.shape for v in handed] == [(R, WIDTHS[stage + 1])]


def test_a_scan_that_makes_both_gradients_is_divided_where_both_are_wanted():
    c = cut("split_backward_of_scans")
    everywhere = ["F0", "F1", "F2", "F3", "I3", "I2", "I1", "W3", "W2", "W1", "W0"]
    assert c.count("scan") == dict.fromkeys(everywhere, 1)
    assert c.matmuls() == {**dict.fromkeys(everywhere, 1), "W0": 2}


def test_a_metric_of_the_weights_gradients_is_in_the_weight_half():
    c, without = cut("metric_of_gradients_in_a_split_backward"), cut("split_backward")
    assert c.matmuls() == without.matmuls()
    assert c.bytes_crossing() == without.bytes_crossing()
    parts = [n for n, _, _ in c.moved()]
    assert parts == [M * F32] * 3  # each other stage's squared norm of every microbatch, to the first one's group


def test_a_parameter_is_updated_where_it_lives_though_its_gradient_is_elsewhere():
    c = cut("clipping_in_a_split_backward")
    assert "f32[11,13]" in c.accumulated("W0")
    assert not [name for name, *_ in c.transfers() if name.startswith("params")]


@pytest.mark.parametrize("name", ALL)
def test_no_weight_half_waits_for_one_of_another_stage(name):
    for loop in cut(name).outline.loops:
        made = {v: t.place for t in loop.partition.tasks if t.place.kind == "W" for v in t.writes}
        for t in loop.partition.tasks:
            assert all(made[v].stage == t.place.stage for v in t.reads if v in made), t.place


def test_every_effect_runs_once_in_the_input_half():
    c = cut("effects_in_a_split_backward")
    assert c.effects() == {"F1": 1, "I1": 2}
    assert c.matmuls()["I1"] == 3  # the second message needs the weights' gradient
    assert c.task("W1").is_empty


def test_a_frozen_first_stage_gets_no_gradient():
    c = cut("frozen_first_stage")
    assert c.task("B0").is_empty
    assert c.matmuls() == {"F0": 1, "F1": 1, "F2": 1, "F3": 1, "B3": 2, "B2": 2, "B1": 1}
    assert c.bytes_crossing() == crossings(*TAPERED, backward=()) | {"B3→B2": TAPERED[2], "B2→B1": TAPERED[1]}
    assert [c.where(f"params[{s}]") for s in range(4)] == ONE_GROUP_EACH


def test_a_gradient_goes_through_a_frozen_stage():
    c = cut("frozen_middle_stage")
    assert c.matmuls() == CHAIN | {"B2": 1}
    assert c.bytes_crossing() == crossings(*TAPERED)
    assert c.accumulated("B2") == []
    assert c.residuals("B2") == [f32(R, WIDTHS[3])]  # its output; its input only its weights would need


def test_a_frozen_parameter_lives_in_its_stage_alone():
    assert [cut("frozen_middle_stage").where(f"params[{s}]") for s in range(4)] == ONE_GROUP_EACH


def test_a_forward_only_loop_keeps_nothing_for_a_backward():
    c = cut("forward_only")
    assert c.bytes_crossing() == crossings(*TAPERED, backward=())
    assert all(c.task(f"B{s}").is_empty for s in range(4))
    assert [[_nbytes(v) for v in c.task(f"F{s}").writes] for s in range(4)] == [
        [TAPERED[0]],
        [TAPERED[1]],
        [TAPERED[2]],
        [],
    ]


@pytest.mark.parametrize(("name", "itemsize"), [("tied_embedding", 4), ("tied_in_mixed_precision", 2)])
def test_a_tied_weight_is_summed_once_a_step(name, itemsize):
    c = cut(name)
    assert c.matmuls() == {"F1": 1, "F2": 1, "F3": 1, "B3": 2, "B2": 2, "B1": 2}
    assert c.count("scatter-add")["B0"] == 1
    assert c.bytes_crossing() == crossings(*[R * D * itemsize] * 3)
    assert c.where("params['embedding']") == {0, 3}
    assert c.accumulated("B0") == c.accumulated("B3") == ["f32[10,8]"]
    assert c.moved() == [(f32(V, D), 3, 0), (f32(V, D), 0, 3)]  # the gradient's part there, the new weight back


def test_the_gradient_of_a_tied_head_is_in_the_weight_half():
    c = cut("tied_with_a_split_backward")
    assert c.matmuls() == dict.fromkeys(["F1", "F2", "F3", "I3", "I2", "I1", "W3", "W2", "W1"], 1)
    assert [v for v in c.task("W3").reads if _nbytes(v) == f32(V, D)] == []


def test_a_tied_gradient_does_not_cross_in_a_split_backward():
    c = cut("tied_with_a_split_backward")
    assert {x.type for x in c.crossings()} == {"f32[3,8]"}
    assert c.moved() == [(f32(V, D), 3, 0), (f32(V, D), 0, 3)]


@pytest.mark.parametrize("name", ["shared_by_all_stages", "stacked_weights", "stacked_layers", "stacked_and_reshaped"])
def test_no_gradient_of_a_shared_weight_crosses_for_each_microbatch(name):
    assert cut(name).bytes_crossing() == crossings(*EQUAL)


def test_a_weight_of_all_stages_is_summed_once_a_step():
    c = cut("shared_by_all_stages")
    assert c.matmuls() == CHAIN
    assert c.where("params") == {0, 1, 2, 3}
    assert [c.accumulated(f"B{s}") for s in range(4)] == [["f32[8,8]"]] * 4
    part = f32(D, D)
    assert c.moved() == [(part, s, 0) for s in (1, 2, 3)] + [(part, 0, s) for s in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("stacked_and_split", 1),
        ("stacked_and_indexed", 1),
    ],
)
def test_the_gradient_of_a_slice_is_accumulated_and_sent_unpadded(name, rows):
    c = cut(name)
    assert [c.accumulated(f"B{s}") for s in range(4)] == [[f"f32[{rows},8,8]"]] * 4
    sent = [n for n, _, target in c.moved() if target == 0]
    assert sent == [f32(rows, D, D)] * 3


@pytest.mark.parametrize(
    "name",
    [
        "stacked_and_split",
        "stacked_and_indexed",
    ],
)
def test_however_a_stack_is_sliced_its_gradients_do_not_cross_for_each_microbatch(name):
    assert cut(name).bytes_crossing() == crossings(*EQUAL)


@pytest.mark.parametrize(("name", "rows"), [("stacked_weights", 1), ("stacked_layers", 2), ("stacked_and_reshaped", 2)])
def test_each_stage_has_the_rows_of_a_stack_that_it_slices_and_no_others(name, rows):
    c = cut(name)
    assert [c.accumulated(f"B{s}") for s in range(4)] == [[f"f32[{rows},8,8]"]] * 4
    assert [c.where(f"params[{rows * s}:{rows * s + rows}]") for s in range(4)] == [{0}, {1}, {2}, {3}]
    assert c.moved() == []


def test_a_shared_bias_crosses_once_a_step():
    assert cut("shared_bias").bytes_crossing() == crossings(*EQUAL)


def test_each_stage_accumulates_its_part_of_a_shared_bias():
    c = cut("shared_bias")
    assert [c.accumulated(f"B{s}") for s in range(4)] == [["f32[8,8]", "f32[8]"]] * 4


def test_a_skip_connection_crosses_once_there_and_once_back():
    c = cut("skip_before_the_mark")
    assert c.matmuls() == CHAIN
    state = f32(R, D)
    assert c.bytes_crossing() == crossings(*EQUAL) | {"F0→F3": state, "B3→B0": state}
    assert len(c.crossings()) == 8
    assert c.residuals("B3") == [state] * 3  # the sum that the layer reads, its output, the error


def test_a_skip_connection_from_behind_a_mark_returns_to_the_stage_that_the_mark_begins():
    c = cut("skip_after_the_mark")
    assert c.matmuls() == CHAIN
    state = f32(R, D)
    assert c.bytes_crossing() == crossings(*EQUAL) | {"F0→F3": state, "B3→B1": state}


def test_between_stages_of_one_group_nothing_is_sent():
    c = cut("skip_within_a_group")
    state = f32(R, D)
    assert c.bytes_crossing() == {"F0→F1": state, "F2→F3": state, "I3→I2": state, "I1→W0": state}
    assert [c.where(f"params[{s}]") for s in range(4)] == [{0}, {1}, {1}, {0}]


def test_stages_are_dealt_to_groups_as_the_schedule_says():
    c = cut("two_stages_a_group")
    assert c.matmuls() == CHAIN
    assert c.bytes_crossing() == crossings(*TAPERED)
    assert [c.where(f"params[{s}]") for s in range(4)] == [{0}, {1}, {0}, {1}]


def test_what_marks_only_pass_on_goes_straight_to_its_reader():
    c = cut("passed_through_marks")
    assert c.matmuls() == CHAIN
    state, narrow, skip = f32(R, D), f32(R, 6), f32(R, 5)
    assert c.bytes_crossing() == crossings(state, narrow, state) | {"F0→F3": skip, "B3→B0": skip}


def test_data_that_marks_pass_on_is_read_where_it_is_used():
    c = cut("passed_through_marks")
    assert c.where("batch['kept']") == c.where("batch['y']") == {3}
    assert not any(x.type.startswith("i") for x in c.crossings())


def test_a_checkpointed_stage_keeps_its_input_alone():
    c = cut("checkpointed_stages")
    assert c.matmuls() == {"F0": 1, "F1": 1, "F2": 1, "F3": 1, "B3": 3, "B2": 3, "B1": 3, "B0": 2}
    assert c.bytes_crossing() == crossings(*TAPERED)
    assert [c.residuals(f"B{s}") for s in range(3)] == [[], [TAPERED[0]], [TAPERED[1]]]
    assert c.residuals("B3") == [f32(R, WIDTHS[4]), TAPERED[2]]  # and the error of the loss


def kept_by_tanh():
    """How many activations plain JAX keeps of each layer x = tanh(x @ w) of a scan: three, or two in newer releases."""

    def layers(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    w, x = jax.ShapeDtypeStruct((3, D, D), jnp.float32), jax.ShapeDtypeStruct((R, D), jnp.float32)
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(layers, *args)[1], w, x))
    return sum(k.shape == (3, R, D) for k in kept)


def test_a_scan_over_layers_keeps_activations_and_no_weights():
    c = cut("scans")
    assert c.count("scan") == dict.fromkeys(CHAIN, 1)
    assert c.matmuls() == {"F0": 1, "F1": 1, "F2": 1, "F3": 1, "B3": 2, "B2": 2, "B1": 2, "B0": 2}
    assert c.bytes_crossing() == crossings(*EQUAL)
    for stage, layers in enumerate((3, 2, 2, 4)):
        error = [f32(R, D)] * (stage == 3)
        assert c.residuals(f"B{stage}") == [*error, *[f32(layers, R, D)] * kept_by_tanh()]
        assert c.accumulated(f"B{stage}") == [f"f32[{layers},8,8]"]


def test_casts_of_weights_are_hoisted_and_activations_cross_in_half_the_bytes():
    c = cut("mixed_precision")
    assert c.outside("convert_element_type") == dict.fromkeys(range(4), 1)
    assert c.matmuls() == CHAIN
    assert c.bytes_crossing() == crossings(*(n // 2 for n in TAPERED))
    assert c.residuals("B1") == [TAPERED[0] // 2, TAPERED[1] // 2]
    read = {str(v.aval.dtype) for t in c.loop.partition.tasks for v in t.operands if v.aval.ndim == 2}
    assert read == {"bfloat16"}
    assert [c.accumulated(f"B{s}")[0][:3] for s in range(4)] == ["f32"] * 4
    assert c.moved() == []


def test_a_dropout_mask_is_made_in_its_stage_and_kept_as_bools():
    c = cut("dropout")
    assert c.count("random_bits") == {f"F{s}": 1 for s in range(4)}
    assert c.bytes_crossing() == crossings(*EQUAL)
    assert c.where("key") == {0, 1, 2, 3}
    state, mask = f32(R, D), R * D
    assert c.residuals("B0") == [mask, state]
    assert c.residuals("B1") == c.residuals("B2") == [mask, state, state]
    assert c.residuals("B3") == [mask, state, state, state]


def test_only_scalars_cross_after_the_loop_for_clipping_schedules_and_drift():
    c = cut("clipped_by_global_norm")
    assert c.moved() == []
    sent = Counter((source, target) for _, _, source, target in c.transfers())
    assert all(sent[s, 0] == 2 for s in (1, 2, 3))  # the norm's and the drift's parts; the loss is in one of group 3's
    assert all(sent[0, s] == 2 for s in (1, 2, 3))  # the clipping's scale and the rate, packed; the drift
    assert [c.where(f"state['params'][{s}]") for s in range(4)] == ONE_GROUP_EACH
    assert [c.where(f"state['momentum'][{s}]") for s in range(4)] == ONE_GROUP_EACH
    assert c.where("state['count']") == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["weight_decay_in_the_loss", "norm_of_the_parameters"])
def test_a_sum_over_all_parameters_leaves_them_in_their_groups(name):
    c = cut(name)
    assert [c.where(f"params[{s}]") for s in range(4)] == ONE_GROUP_EACH
    assert c.moved() == []


def test_the_gradient_of_weight_decay_is_added_in_each_stage():
    c = cut("weight_decay_in_the_loss")
    assert c.matmuls() == CHAIN
    assert c.bytes_crossing() == crossings(*TAPERED)
    assert [len(c.accumulated(f"B{s}")) for s in range(4)] == [1] * 4


def test_a_second_loop_reads_new_parameters_where_they_are():
    c = cut("two_loops")
    train, evaluate = c.outline.loops
    assert c.matmuls(train) == CHAIN
    assert c.matmuls(evaluate) == {"F0": 1, "F1": 1, "F2": 1, "F3": 1}
    assert c.bytes_crossing(train) == crossings(*TAPERED)
    assert c.bytes_crossing(evaluate) == crossings(*TAPERED, backward=())
    assert all(c.task(f"B{s}", evaluate).is_empty for s in range(4))
    assert c.moved() == []


def test_a_backward_pass_written_by_hand_is_in_the_backward_task():
    c = cut("custom_derivative")
    assert c.matmuls() == CHAIN | {"B1": 3, "B2": 3, "B3": 3}
    assert c.bytes_crossing() == crossings(*TAPERED)
    assert c.residuals("B1") == [TAPERED[0]]
    assert c.residuals("B2") == [TAPERED[1]]


def test_branches_and_loops_stay_whole():
    c = cut("branches_and_loops")
    assert c.count("cond") == {"F1": 1, "B1": 1}
    assert c.count("scan") == {"F2": 1, "B2": 1}
    assert c.bytes_crossing() == crossings(*EQUAL)
    assert c.residuals("B2") == [f32(3, R, D)] * kept_by_tanh()


@pytest.mark.parametrize(
    "name, state",
    [
        ("steps_that_may_be_skipped", ("params", "momentum")),
        ("gradients_of_several_steps", ("params", "total")),
        ("history_of_gradients", ("params", "history")),
    ],
)
def test_control_flow_around_the_optimizer_leaves_each_groups_state_in_it(name, state):
    c = cut(name)
    assert c.moved() == []
    for part in state:
        assert [c.where(f"state['{part}'][{s}]") for s in range(4)] == ONE_GROUP_EACH
    sent = Counter((source, target) for _, _, source, target in c.transfers())
    assert max(sent.values()) <= 8


def test_a_while_loop_over_all_gradients_is_one_for_each_group():
    c = cut("orthogonal_updates")
    assert c.moved() == []
    assert c.outside("while") == dict.fromkeys(range(4), 1)
    assert c.outside() == dict.fromkeys(range(4), 2)


def test_scalars_cross_in_one_transfer_per_pair_of_groups_and_level():
    for name in ALL:
        moves = [i for i in cut(name).outline.items if hasattr(i, "target") and i.level >= 0]
        scalars = [t for t in moves if t.var.aval.shape == () or _is_packed(t.var)]
        assert len(scalars) == len({(t.source, t.target, t.level) for t in scalars}), name
