"""Trains or fine-tunes a decoder of the Llama family as a pipeline.

    python examples/llama/train.py                                       # a small model, text that every machine has
    python examples/llama/train.py --model DIR --text notes/ --export OUT   # a Hugging Face folder in, one out
    python examples/llama/train.py --model DIR --text notes/ --lora 8    # the base is frozen
    scripts/launch_multihost.sh -n 4 --cpu-devices 1 -- python examples/llama/train.py --checkpoint-dir run
    python -m mpmd plan examples/llama/train.py:plan --target h100 --groups 8        # before you book the cluster

A group of devices runs one stage or several; inside a group, the rules in parallel.py say which axis of the mesh
divides which axis of the parameters. Where stages end is chosen by cost (`mark_layer_end` in model.py), or given by
--cuts.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from attention import CHUNK as QUERIES
from attention import kernel_fault, packed_fault
from balance import rows_of
from buckets import BatchesByLength
from checkpoints import Checkpoints
from context import AXIS as CONTEXT
from context import num_parts, zigzag
from data import Batches, Tokenizer, tokenizer_of
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from logs import Speed, Trace, writers
from model import CHUNK, Config, Decoder, LoRA, config_json
from parallel import AXES, RULES, make_mesh, peak_flops, spec_of

import mpmd
import reshard.checkpoint
from scheduler.schedules import catalogue


class Model:
    """The module as functions of trees of arrays: the trained and the frozen parameters."""

    def __init__(self, config: Config):
        self.config = config
        kinds = (LoRA, ...) if config.lora_rank else (...,)
        self.graph, *self.states = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))), *kinds)
        self.kinds = kinds

    def init(self, key: jax.Array) -> list[Any]:
        """Makes parameters: the trained ones in float32, and frozen ones, if any, in the dtype of the computation."""
        _, *states = nnx.split(Decoder(self.config, nnx.Rngs(key)), *self.kinds)
        trained, *frozen = [nnx.to_pure_dict(state) for state in states]
        return [trained, *jax.tree.map(lambda x: x.astype(self.config.dtype), frozen)]

    def bind(self, params: list[Any]) -> Decoder:
        """Returns the module with these parameters."""
        states = [jax.tree.map(lambda x: x, state) for state in self.states]
        for state, values in zip(states, params, strict=True):
            nnx.replace_by_pure_dict(state, values)
        return nnx.merge(self.graph, *states)


def muon_axes(params: Any) -> Any:
    """Returns which axes of a stacked parameter are rows and columns for Muon; other parameters get AdamW."""

    def axes(path, p):
        name, last = path[-1].key, p.ndim - 1
        if "layers" not in [key.key for key in path[:-1]] or name not in AXES:
            return None
        two = {"query": ((1,), (2, 3)), "key": ((1,), (2, 3)), "value": ((1,), (2, 3)), "output": ((1, 2), (3,))}
        return optax.contrib.MuonDimensionNumbers(*two.get(name, ((last - 1,), (last,))))

    return jax.tree_util.tree_map_with_path(axes, params)


def optimizer_of(options: argparse.Namespace) -> optax.GradientTransformation:
    """Makes AdamW or Muon with clipping by the global norm; warmup over a tenth of the steps, then cosine decay."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.lr, max(1, options.steps // 10), max(2, options.steps), options.lr / 10
    )
    if options.muon:
        rule = optax.contrib.muon(rate, muon_weight_dimension_numbers=muon_axes)
    else:
        rule = optax.adamw(rate, b2=0.95, weight_decay=0.0 if options.lora else 0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def divided(grads: Any) -> Any:
    """Puts gradients in the layout of their parameters: each device of a group adds up its own part."""
    group = jax.sharding.get_abstract_mesh()
    if not {name for name in RULES.values() if name}.issubset(group.axis_names):
        return grads

    def of(path, x):
        return jax.lax.with_sharding_constraint(x, spec_of(path, x.shape, group))

    return jax.tree_util.tree_map_with_path(of, grads)


class Program:
    """The functions of a run, and the layout of its state."""

    def __init__(self, config: Config, options: argparse.Namespace, mesh: mpmd.MpmdMesh):
        self.model = Model(with_kernel(config, options, mesh))
        self.mesh, self.options, self.cuts = mesh, options, options.cuts
        self.optimizer = optimizer_of(options)
        self.step = mpmd.jit(self._step, mpmd_mesh=mesh, donate_argnums=0)
        self.evaluation: Any = None

    def init(self, key: jax.Array) -> dict[str, Any]:
        params = self.model.init(key)
        return {"params": params, "optimizer": self.optimizer.init(params[0]), "step": jnp.zeros((), jnp.int32)}

    def _loop(self, function, batch) -> Any:
        options = self.options
        weights = (lambda microbatch: microbatch["weights"].sum()) if options.buckets else None  # a mean over tokens
        return mpmd.treduce(function, batch, options.schedule, operation=mpmd.Mean, cuts=self.cuts, weights=weights)

    def _step(self, state, batch):
        trained, *frozen = state["params"]

        def one(batch):
            loss, grads = jax.value_and_grad(lambda trained: self.model.bind([trained, *frozen]).loss(batch))(trained)
            return loss, divided(grads)

        loss, grads = self._loop(one, batch)
        updates, optimizer = self.optimizer.update(grads, state["optimizer"], trained)
        trained = optax.apply_updates(trained, updates)
        state = {"params": [trained, *frozen], "optimizer": optimizer, "step": state["step"] + 1}
        return state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    def _evaluate(self, params, batch):
        return self._loop(lambda batch: self.model.bind(params).loss(batch), batch)

    def held_out_loss(self, params: Any, batches: Batches | BatchesByLength, layout: Any) -> float:
        """Returns the loss on held-out text: the forward half of the same pipeline, where the parameters are.

        Args:
          layout: the layout of the training batches; lists are evaluated in the same layout.
        """
        if self.evaluation is None:
            self.evaluation = mpmd.jit(self._evaluate, mpmd_mesh=self.mesh)
            if not self.options.buckets:
                self.evaluation = self.evaluation.lower(params, self.abstract()[1]).compile()
        if not self.options.buckets:
            layout = self.evaluation.input_shardings[0][1]
        indices = range(self.options.eval_batches)
        losses = [self.evaluation(params, batches.placed(i, layout, held_out=True)) for i in indices]
        return float(np.mean([float(loss) for loss in losses]))

    def abstract(self) -> tuple[Any, Any]:
        """Returns types, and layouts inside of a group, of the state and of a batch."""
        group = self.mesh.tracing_mesh()

        def typed(path, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(group, spec_of(path, x.shape, group)))

        state = jax.tree_util.tree_map_with_path(typed, jax.eval_shape(self.init, jax.random.key(0)))
        names = ("tokens", "targets", *(() if self.options.whole_rows else ("segments", "positions")), "weights")

        def batch(*shape):
            axes = ("data", CONTEXT) if num_parts(group) > 1 else ("data",)
            rows = NamedSharding(group, P(*[None] * (len(shape) - 2), *axes))
            dtypes = {name: jnp.float32 if name == "weights" else jnp.int32 for name in names}
            return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for name, dtype in dtypes.items()}

        o = self.options
        if o.buckets:
            return state, [batch(rows, length) for length, rows in rows_of_buckets(o, self.model.config).items()]
        return state, batch(o.microbatches, o.batch // o.microbatches, o.length)

    def flops_per_step(self, batches: Batches | BatchesByLength) -> float:
        """Counts as MFU does: the forward, and twice as much for the backward, without recomputation."""
        passes = 2 if self.model.config.lora_rank else 3  # a frozen matrix has no gradient
        return passes * batches.per_step(self.model.config.flops_per_row)


class Stop:
    """Whether some process was asked to stop (SIGTERM: a preemption); all agree on it.

    With `--restarts` a process that is asked leaves alone (`mpmd.resilient`); all stop only if all are asked.
    """

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def agreed(self) -> bool:
        """Returns the same answer in every process. Call it where no step is in flight."""
        if jax.process_count() == 1:
            return self.asked
        asked = multihost_utils.process_allgather(np.array(self.asked))
        return bool(asked.all() if "MPMD_KEEPER" in os.environ else asked.any())


def agree(seen: dict[str, int]) -> dict[str, int]:
    """Checks that all processes see the same files, and returns the numbers that all see.

    Otherwise they would train on different text, or continue after different steps, and nobody would notice. A process
    that replaces a lost one gets the numbers that the others saw before.

    Raises:
      ValueError: they do not. Raised in every process, with the difference and its ranks.
    """
    if jax.process_count() == 1:
        return seen
    found = multihost_utils.process_allgather(np.array(list(seen.values()), np.uint32))
    for name, values in zip(seen, found.T, strict=True):
        if len(others := np.flatnonzero(values != values[0])):
            raise ValueError(
                f"the {name} is {values[0]} in rank 0 and {values[others[0]]} in rank {others[0]}.\n  All processes"
                " must see the same files: give a folder that all of them share, or the same copy to each."
            )
    return dict(zip(seen, map(int, found[0]), strict=True))


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def generate(program: Program, params: Any, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """Continues a prompt greedily. The parameters stay where they are; a token passes through all groups."""
    window = program.options.length
    order = zigzag(window, program.options.context)

    @mpmd.jit(mpmd_mesh=program.mesh)
    def next_token(params, buffer, filled):
        return program.model.bind(params)(buffer[None, order])[0, jnp.argmax(order == filled - 1)].argmax()

    tokens = [int(token) for token in tokenizer.encode(prompt.encode())] or [tokenizer.end]
    start = len(tokens)
    while len(tokens) < start + count:
        seen = tokens[-window:]
        buffer = np.array(seen + [0] * (window - len(seen)), np.int32)
        tokens.append(int(mpmd.device_get(next_token(params, buffer, np.int32(len(seen))))))
        if tokens[-1] == tokenizer.end:
            break
    return prompt + tokenizer.decode(tokens[start:])


def first_state(program: Program, shardings: Any) -> Any:
    """Makes a random state, or restores a Hugging Face folder's weights, with a new optimizer state."""
    options = program.options
    make = mpmd.jit(program.init, mpmd_mesh=program.mesh, out_shardings=shardings)
    state = make(jax.random.key(options.seed))
    if options.model:
        last = jax.eval_shape(program.init, jax.random.key(0))["params"][-1]  # the base, where LoRA is trained
        state["params"][-1] = reshard.checkpoint.restore(options.model, last, shardings["params"][-1], mapping="auto")
    return state


def export(program: Program, params: list[Any], options: argparse.Namespace) -> None:
    """Writes the weights as a Hugging Face folder like that of --model; LoRA's factors are multiplied out."""
    config = config_json(options.model)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if options.lora:

        def merged(factors, base):
            low, attention = factors["layers"]["attention"], base["layers"]["attention"]
            change = jnp.einsum("ldr,lrhk->ldhk", low["query_in"], low["query_out"])
            attention = attention | {"query": attention["query"] + change}
            return base | {"layers": base["layers"] | {"attention": attention}}

        factors, base = params
        layout = jax.tree.map(lambda x: x.mpmd_sharding, base)
        if jnp.dtype(dtype) != program.model.config.dtype:  # the frozen base has fewer digits than its folder
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), base)
            base = reshard.checkpoint.restore(options.model, like, layout, mapping="auto")
        params = [mpmd.jit(merged, mpmd_mesh=program.mesh, out_shardings=layout)(factors, base)]
    how = reshard.checkpoint.TensorFormat("auto", files_of=options.model, dtype=dtype)
    reshard.checkpoint.save(options.export, params[-1], tensors=how)


def saved(state: Any) -> Any:
    """Returns the part of a state (or its types, or shardings) in a checkpoint: all but frozen parameters."""
    return state | {"params": state["params"][:1]}


def resumed(program: Program, checkpoints: Checkpoints, shardings: Any) -> Any:
    """Restores the state of the newest checkpoint. Frozen parameters come from their first source."""
    like = saved(jax.eval_shape(program.init, jax.random.key(0)))
    state = checkpoints.restore(like, saved(shardings))
    frozen = first_state(program, shardings)["params"][1:] if program.options.lora else []
    say(f"goes on after step {checkpoints.newest}")
    return state | {"params": [*state["params"], *frozen]}


@contextlib.contextmanager
def told(*kinds: type[Exception]) -> Iterator[None]:
    """Ends the program with the text of an error that its user can repair, without a traceback."""
    try:
        yield
    except kinds as error:
        sys.exit(f"train.py: {error}")


def run(options: argparse.Namespace) -> int:
    """Does the whole run. Returns the exit status."""
    mpmd.initialize()
    with told(OSError, ValueError):
        tokenizer = tokenizer_of(options.model)
        config = config_of(options, tokenizer)
        batches = batches_of(options, config, tokenizer)
        checkpoints = Checkpoints(options.checkpoint_dir, options.keep) if options.checkpoint_dir else None
        if options.model:
            reshard.checkpoint.restore(options.model, {}, partial=True)  # are all files there, before anything compiles
        newest = "step of the newest checkpoint (--checkpoint-dir)"
        seen = {
            "checksum of the configuration (--model)": crc32(repr(config).encode()),
            "checksum of the text (--text)": batches.checksum,
            newest: checkpoints.newest if checkpoints else 0,
        }
        first = agree(seen)[newest]
    program = Program(config, options, make_mesh(options.groups, options.data, options.tensor, options.context))
    count = sum(x.size for x in jax.tree.leaves(program.abstract()[0]["params"]))
    if isinstance(batches, BatchesByLength):
        say(str(batches))
    say(f"{count:,} parameters in {options.groups} groups; {options.schedule}; compiling ...")
    lowered = program.step.lower(*program.abstract())
    program.cuts = lowered.cuts  # an evaluation alone would be cut differently, and its parameters moved
    compiled = lowered.compile()
    say(f"compiled; layers of each stage: {lowered.cuts}")
    shardings = compiled.input_shardings[0][0]
    state = resumed(program, checkpoints, shardings) if checkpoints and first else first_state(program, shardings)
    status, state = train(program, compiled, state, batches, checkpoints, first)
    if checkpoints:
        checkpoints.wait()
    if status == 0 and options.export:
        export(program, state["params"], options)
    if status == 0 and options.generate:
        text = generate(program, state["params"], tokenizer, options.generate, 64)
        if jax.process_index() == 0:
            print(text)
    return status


class Ended(Exception):
    """The steps end here.

    Attributes:
      status: the exit status of the program.
    """

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


def train(
    program: Program,
    compiled: Any,
    state: Any,
    batches: Batches | BatchesByLength,
    checkpoints: Checkpoints | None,
    first: int,
) -> tuple[int, Any]:
    """Takes steps from `first` on, also after the loss of a process (--restarts). Status 75: stopped by a signal."""
    options, stop, layout = program.options, Stop(), batch_layout(compiled)
    takes_lists = bool(options.buckets)  # the compiled step does not: it is for the largest microbatch
    trace = Trace(options.profile, options.log or "profile")
    flops, peak = program.flops_per_step(batches), peak_flops(program.mesh)
    speed = Speed(options.steps, batches.per_step(float), flops / peak if peak else None)
    report = writers(options.steps, options.log) if jax.process_index() == 0 else []

    def take_step(done: int, state: Any) -> Any:
        step, is_first, is_last = done + 1, done == first, done + 1 == options.steps
        reports, evaluates, saves = (
            is_last or (bool(every) and step % every == 0)
            for every in (options.report_every, options.eval_every, options.save_every)
        )
        reports |= is_first
        trace.before(step)
        compiled.timing = reports and not is_first and not takes_lists  # notes when each group computes
        state, metrics = (program.step if takes_lists else compiled)(state, batches.placed(done, layout))
        trace.after(step, state)
        if not (reports or evaluates or saves):
            return state
        numbers = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
        if not all(map(math.isfinite, numbers.values())):  # before this state is saved
            say(f"step {step}: {numbers}; the last checkpoint is of step {checkpoints and checkpoints.newest}")
            raise Ended(1)
        if reports and speed.step < step:  # not the first step of this program, or since a process was lost
            numbers |= speed.numbers(step, compiled.last_timeline().busy if compiled.timing else ())
        if options.eval_every and evaluates:
            numbers["held_out_loss"] = program.held_out_loss(state["params"], batches, layout)
        if reports or evaluates:
            try:
                for write in report:
                    write(step, numbers)
            except OSError as error:
                raise OSError(f"the numbers of step {step} could not be written to {options.log}: {error}") from error
        if saves and checkpoints:
            checkpoints.save(step, saved(state))
        if reports:
            jax.block_until_ready(state)
            if not is_last and stop.agreed():
                if checkpoints:
                    checkpoints.save(step, saved(state))
                say(f"stopped by a signal after step {step}" + ("; saved" if checkpoints else ""))
                raise Ended(75)
        speed.start(step)  # work between steps does not count
        return state

    try:
        state = mpmd.resilient(take_step, state, options.steps, start=first)
    except Ended as end:
        return end.status, state
    trace.end(state)
    return 0, state


def batch_layout(compiled: Any) -> Any:
    """Returns where the step wants the leaves of a batch, or of a list's microbatches, which are all alike."""
    batch = compiled.input_shardings[0][1]
    return getattr(batch, "one", batch)


def rows_of_buckets(options: argparse.Namespace, config: Config) -> dict[int, int]:
    """Returns the rows of a microbatch for each length of --buckets: for the longest, the same as without buckets."""
    return rows_of(options.buckets, config.flops_per_row, options.batch // options.microbatches, options.data)


def batches_of(options: argparse.Namespace, config: Config, tokenizer: Tokenizer) -> Batches | BatchesByLength:
    """Makes batches of packed rows, or of documents in buckets."""
    o = options
    if o.buckets:
        rows = rows_of_buckets(o, config)
        return BatchesByLength(o.text, tokenizer, rows, config.flops_per_row, o.microbatches, o.data, o.seed)
    return Batches(o.text, tokenizer, o.batch, o.length, o.microbatches, o.seed)


def with_kernel(config: Config, options: argparse.Namespace, mesh: mpmd.MpmdMesh) -> Config:
    """Returns the configuration with attention by a kernel, where possible. On GPUs, prints why where it is not."""
    if mesh.lowering_mesh().devices.flat[0].platform != "gpu":
        return config
    fault, packed = kernel_fault(mesh, config.kv_heads, config.head_dim, config.dtype), ""
    if config.attention_cap:
        fault = "cuDNN does not cap scores"
    elif options.context > 1:
        fault = "keys and values go around a ring (--context)"
    elif options.packed_kernel and not options.whole_rows:
        fault = packed_fault(mesh, config.kv_heads, config.head_dim, config.all_windows, options.length)
        packed = "" if fault else "compiled"
    elif not options.whole_rows:
        fault = "cuDNN does not keep packed documents apart (--whole-rows takes a row as one document, --packed-kernel"
        fault += " has JAX's kernel)"
    if fault:
        say(f"attention in chunks of {QUERIES} queries, without a kernel: {fault}")
    return dataclasses.replace(config, kernel=fault is None and not packed, packed=packed)


def config_of(options: argparse.Namespace, tokenizer: Tokenizer) -> Config:
    """Returns the configuration of --model, or of a small model.

    Raises:
      ValueError: --model has no config.json that this example can read, or the layout does not suit it.
    """
    config = _config_of(options, tokenizer)
    if config.experts and options.context > 1:
        raise ValueError("--context divides no rows for experts, whose tokens stand together; use --data or --tensor")
    return config


def _config_of(options: argparse.Namespace, tokenizer: Tokenizer) -> Config:
    if options.model:
        return Config.of_folder(options.model, lora_rank=options.lora)
    return Config(vocabulary=tokenizer.vocabulary, layers=options.layers, width=options.width, hidden=3 * options.width,
                  experts=options.experts, lora_rank=options.lora)  # fmt: skip


def plan(mesh: mpmd.MpmdMesh, schedule: str = "1f1b", num_microbatches: int = 32, length: int = 8192):
    """Builds a step of Llama 3 with 8 billion parameters on rows of one document, for `python -m mpmd plan`."""
    axes = [name for name in mesh.lowering_mesh().axis_names if name != mesh.mpmd_axis_name]
    RULES.update(width=axes[0], vocabulary=None, heads=None, hidden=None, experts=None)
    options = parse(["--whole-rows"])
    options.schedule, options.microbatches, options.length = schedule, num_microbatches, length
    options.batch = num_microbatches * mesh.lowering_mesh().size
    config = Config(128256, 4096, 14336, 32, 32, 8, 128)
    program = Program(config, options, mesh)
    return program.step, program.abstract()


def numbers_of(text: str) -> tuple[int, ...]:
    """Parses numbers with commas between them."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 64,128,256")
    return tuple(map(int, text.split(",")))


def steps_of(text: str) -> tuple[int, int]:
    """Parses `A:B`, the first and the last step."""
    parts = text.split(":")
    if len(parts) != 2 or not all(map(str.isdecimal, parts)) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no A:B with 1 <= A <= B, such as 5:8")
    return int(parts[0]), int(parts[1])


LEAST = {  # the least values of options that are numbers
    **dict.fromkeys(("groups", "data", "context", "tensor", "layers", "width", "microbatches", "batch", "length"), 1),
    **dict.fromkeys(("eval_batches", "keep"), 1),
    **dict.fromkeys(("experts", "lora", "seed", "steps", "eval_every", "report_every", "save_every"), 0),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", metavar="DIR", help="a Hugging Face folder: config.json, safetensors, tokenizer.json")
    add("--text", nargs="+", default=[], metavar="PATH[=WEIGHT]", help="files or folders of text to train on")
    add("--layers", type=int, default=8, help="layers (default: %(default)s)")
    add("--width", type=int, default=128, help="width of a layer (default: %(default)s)")
    add("--experts", type=int, default=0, help="experts of each layer (default 0: none)")
    add("--groups", type=int, default=4, help="pipeline groups (default 4)")
    add(
        "--data",
        type=int,
        default=1,
        help="devices of a group that share the rows and divide the parameters (default: %(default)s)",
    )
    add(
        "--context",
        type=int,
        default=1,
        help="devices of a group that divide each row, for long documents (default: %(default)s)",
    )
    add(
        "--tensor",
        type=int,
        default=1,
        help="devices of a group that divide heads and hidden units (default: %(default)s)",
    )
    add("--schedule", default="1f1b", help="any of `python -m scheduler compare` (default 1f1b)")
    add("--cuts", type=numbers_of, help="layers of each stage; default: by cost")
    add("--microbatches", type=int, default=8, help="microbatches of a step (default: %(default)s)")
    add("--batch", type=int, default=16, help="rows of a step (default 16)")
    add("--length", type=int, default=128, help="tokens of a row (default 128)")
    add(
        "--buckets",
        type=numbers_of,
        metavar="LENGTHS",
        help="each document is a row, padded to the first of these ascending lengths that holds it; default: packing",
    )
    add(
        "--whole-rows", action="store_true", help="documents packed in a row see each other; GPUs use cuDNN's attention"
    )
    add(
        "--packed-kernel",
        action="store_true",
        help="on GPUs, JAX's kernel in Triton for documents packed in a row, which was compiled for them and not run",
    )
    add("--steps", type=int, default=200, help="steps (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    add("--muon", action="store_true", help="Muon for the matrices of the layers, AdamW for the rest")
    add(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="train only small factors of this rank (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of parameters and shuffling (default: %(default)s)")
    add(
        "--eval-every",
        type=int,
        default=50,
        metavar="N",
        help="steps between evaluations on held-out text; 0: none (default: %(default)s)",
    )
    add("--eval-batches", type=int, default=4, help="batches of an evaluation (default: %(default)s)")
    add(
        "--report-every",
        type=int,
        default=10,
        metavar="N",
        help="steps between reports, and reactions to SIGTERM (default: %(default)s)",
    )
    add("--log", metavar="DIR", help="metrics.csv, and events for TensorBoard")
    add("--profile", type=steps_of, metavar="A:B", help="trace steps A to B")
    add("--checkpoint-dir", metavar="DIR", help="save here, and go on from what is here")
    add("--save-every", type=int, default=100, metavar="N", help="steps between saves (default: %(default)s)")
    add("--keep", type=int, default=3, metavar="N", help="checkpoints to keep (default 3)")
    add("--export", metavar="DIR", help="write the trained weights as a Hugging Face folder")
    add("--generate", metavar="PROMPT", help="continue this text at the end")
    options = parser.parse_args(argv)
    if options.export and not options.model:
        parser.error("--export writes a folder like that of --model, which is missing")
    if options.export and Path(options.export).exists():
        parser.error(f"--export {options.export}: there is something already; give another path, or delete it first")
    for name, least in LEAST.items():
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')} {value}: give a number of at least {least}")
    if not 0 < options.lr < math.inf:
        parser.error(f"--lr {options.lr}: give a positive number")
    if options.experts == 1:
        parser.error("--experts 1: each token goes to two experts; give 0 for none, or at least 2")
    if options.batch % options.microbatches or options.batch // options.microbatches % options.data:
        parser.error(
            f"--batch {options.batch} is not made of {options.microbatches} microbatches × --data {options.data}"
        )
    try:
        catalogue.make(options.schedule, num_groups=options.groups).orders(options.microbatches)
    except ValueError as error:
        parser.error(f"--schedule {error}")
    lengths = options.buckets or (options.length,)
    if any(x < 1 or x >= y for x, y in zip(lengths, (*lengths[1:], math.inf), strict=True)):
        parser.error(f"--buckets {','.join(map(str, lengths))}: give lengths that ascend, for instance 64,128,256")
    chunk, name = CHUNK * options.context, "buckets" if options.buckets else "length"
    if wrong := [x for x in lengths if x > chunk and x % chunk]:
        parser.error(f"--{name} {wrong[0]}: give a multiple of {chunk}, for which logits are made at a time")
    if options.context > 1 and (wrong := [x for x in lengths if x % (2 * options.context)]):
        parser.error(
            f"--{name} {wrong[0]}: give a multiple of {2 * options.context}; each device of --context gets two parts"
        )
    if options.buckets:  # a row holds one document, and no token sees the padding after it
        options.length, options.whole_rows = lengths[-1], True
    return options


if __name__ == "__main__":
    options = parse()
    if "MPMD_COORDINATOR" not in os.environ:  # devices for the groups, on a machine without GPUs
        jax.config.update("jax_num_cpu_devices", options.groups * options.data * options.context * options.tensor)
    with told(OSError, mpmd.ReshardError, mpmd.ScheduleError, mpmd.StageError):
        sys.exit(run(options))
