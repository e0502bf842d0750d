"""Where each equation of a step runs, and what crosses between groups: a wrong place still gives right numbers.

Each small program below is of one kind. Its printed partition is compared with `tests/golden/partition/NAME.txt`,
and what must hold of it is asserted in code, whatever the print says. After a change of the partition that is meant,

    MPMD_UPDATE_GOLDEN=1 pytest tests/test_partition.py

writes the files anew; read their diff. Nothing here is compiled: all arguments are abstract.
"""

import dataclasses
import difflib
import functools
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

GOLDEN = pathlib.Path(__file__).parent / "golden" / "partition"

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
        outs = [f"{n} in {_groups(g)}" for n, (_, g) in zip(self.outline.trace.out_names, self.outline.outputs, strict=True)]
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
        types = [partition.accumulators[k].value.aval.str_short(short_dtypes=True) for k in self.task(place, loop).accumulates]
        return sorted(types)

    def body(self, place, loop=None):
        """A task's equations with variables numbered: equal for tasks that compile to one executable."""
        task = self.task(place, loop)
        partition = (loop or self.loop).partition
        numbers = {}

        def atom(v):
            if not hasattr(v, "count") and hasattr(v, "val"):
                return f"{v.val}"
            return numbers.setdefault(v, len(numbers)), v.aval.str_short()

        def atoms(vs):
            return tuple(map(atom, vs))

        eqns = [(e.primitive.name, atoms(e.invars), atoms(e.outvars)) for e in task.eqns]
        return eqns, atoms(task.writes), atoms(partition.accumulators[k].value for k in task.accumulates)

    def plain_matmuls(self):
        """Matrix products of the step as it is written, without any pipeline."""
        return _count(_live(jax.make_jaxpr(self.step)(*self.args).jaxpr), "dot_general")


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
    equal_to: str | None = None


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
    return [array(n, m) for n, m in zip(WIDTHS, WIDTHS[1:], strict=False)]


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

        value, grads = mpmd.treduce(lambda mb: jax.value_and_grad(loss)(params, mb), batch, schedule=scheduler.OneFOneB(4))
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

        operation = (mpmd.Mean, {"first": mpmd.Max, "third": mpmd.Min, "positive": mpmd.Add, "norm": mpmd.Concat}, mpmd.Add)
        value, sizes, grads = mpmd.treduce(one, batch, schedule=scheduler.OneFOneB(4), operation=operation)
        return sgd(params, grads), value, sizes

    return step, (tapered_weights(), tapered_batch())


@program
def split_backward():
    return training(tapered_loss, tapered_weights(), tapered_batch(), schedule=scheduler.ZeroBubbleH1(4))


@program
def split_backward_of_scans():
    """The scan over layers makes both gradients: it runs once, in I."""
    return _scans(scheduler.ZeroBubbleH1(4))


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
        return mpmd.treduce(lambda mb: tapered_loss(params, mb), batch, schedule=scheduler.OneFOneB(4), operation=mpmd.Mean)

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
def stacked_and_iterated():

    def loss(w, batch):
        return equal_loss(list(w), batch)

    return training(loss, array(4, D, D), equal_batch())


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
