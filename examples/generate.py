"""Writes texts with the byte-level GPT of train_gpt.py: a sampler whose layers and caches stay in pipeline groups.

    python examples/generate.py                             # trains for a minute, then writes
    python examples/train_gpt.py --checkpoint-dir run && python examples/generate.py --checkpoint-dir run

A byte has to go through all groups before the next byte of its text can start. So the sampler has several *lanes*, and
steps one after the other: while group 1 works on the first lane, group 0 works on the second. A lane has a few rows. A
row writes one text, and when it ends, a waiting text takes its place before the next step. Keys and values are in
*pages*: each lane has a pool of them for each layer, and a row takes as many as its text needs.

The script writes the same texts twice, first one at a time, then with all lanes. They are equal, bit by bit: a row's
results do not depend on the other rows, and each text has its own key for its random choices.
"""

import argparse
import collections
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from train_gpt import EMBED_SCALE, GPT, batch_at, make_init, make_mesh, make_optimizer, make_step, read_text, rms_norm

import mpmd
import reshard.checkpoint
from scheduler import OneFOneB

WINDOW = 128  # bytes of the longest text
NO_BYTE = -1


class Request(NamedTuple):
    """A text to write.

    Attributes:
      prompt: the bytes that it begins with, at least one.
      length: how many bytes to write.
      key: (2,), the data of a PRNG key. A byte's random choice depends on it and on the byte's position.
      temperature: the logits are divided by it; with 0, each byte is the most probable one.
      stop: the text ends with this byte, if it comes before `length` bytes are written.
    """

    prompt: bytes
    length: int
    key: Any = (0, 0)
    temperature: float = 1.0
    stop: int = NO_BYTE


class Text(NamedTuple):
    """The written bytes, (length,), and the log-probability of each.

    With temperature 0, it is the log-probability at temperature 1.
    """

    tokens: Any
    log_probabilities: Any


# The computation in the groups: one byte in each row.


class Rows(NamedTuple):
    """The work of a lane's rows in a step. A row without a text has zeros; so it writes to page 0, which no text has.

    Attributes:
      token: (rows,), the byte to read; `NO_BYTE` stands for the byte that the previous step drew.
      position: (rows,), its position in the text.
      pages: (rows, pages of a text), where the keys and values of the text are.
      key, temperature: (rows, 2) and (rows,), as in `Request`.
    """

    token: Any
    position: Any
    pages: Any
    key: Any
    temperature: Any


def make_advance(model: GPT, choices: range = range(256)) -> Callable[..., tuple[Any, Text]]:
    """Returns a function that reads a byte in each row, and draws the next one among `choices`.

    The caches are keys and values for each layer: (pages, page size, heads, features).
    """

    def advance(params: dict[str, Any], caches: list[dict[str, jax.Array]], last: jax.Array, rows: Rows):
        page_size = caches[0]["keys"].shape[1]
        position = rows.position[:, None]
        page = jnp.take_along_axis(rows.pages, position // page_size, axis=1)[:, 0]
        seen = jnp.arange(rows.pages.shape[1] * page_size) <= position
        x = params["embed"][jnp.where(rows.token == NO_BYTE, last, rows.token)][:, None] / EMBED_SCALE
        new_caches = []
        for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
            query, *new = model.heads(layer, x, position)
            pools = [
                cache[name].at[page, rows.position % page_size].set(entry[:, 0])
                for name, entry in zip(("keys", "values"), new, strict=True)
            ]
            # Zeros replace the values that an earlier text left in a page: a weight of zero would not hide a NaN.
            keys, values = (
                jnp.where(seen[..., None, None], pool[rows.pages].reshape(*seen.shape, *pool.shape[2:]), 0)
                for pool in pools
            )
            attended = jax.nn.dot_product_attention(query, keys, values, mask=seen[:, None, None])
            x = x + attended.reshape(x.shape) @ layer["out"]
            x = x + model.mlp(layer, x)
            if model.ends_stage(index):
                x = mpmd.mark_stage_end(x)
            new_caches.append(dict(zip(cache, pools, strict=True)))
        logits = (rms_norm(x[:, 0], params["norm"]) @ params["embed"].T)[:, choices.start : choices.stop]
        return new_caches, draw(logits, rows, choices.start)

    return advance


def draw(logits: jax.Array, rows: Rows, first: int) -> Text:
    """Draws a byte for each row, from logits (rows, choices) for the bytes from `first` on."""
    greedy = rows.temperature[:, None] == 0
    logits = logits / jnp.where(greedy, 1, rows.temperature[:, None])
    keys = jax.random.wrap_key_data(rows.key, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, rows.position + 1)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)  # what random.categorical adds
    index = jnp.argmax(jnp.where(greedy, logits, logits + noise), axis=1)
    log_probabilities = jnp.take_along_axis(jax.nn.log_softmax(logits), index[:, None], axis=1)[:, 0]
    return Text(index + first, log_probabilities)


# Decisions of the host between steps: which text is in which row and in which pages.


@dataclasses.dataclass(eq=False)
class Row:
    """A text in progress: its pages, the (step, row) of each of its bytes, and the position to read next."""

    request: Request
    pages: list[int]
    places: list[tuple[int, int]]
    position: int = 0


class Lane:
    """The rows of a lane, and its free pages."""

    def __init__(self, rows: int, pages: int, pages_of_text: int):
        self.rows: list[Row | None] = [None] * rows
        self.free_pages = list(range(1, 1 + pages))
        self.pages_of_text = pages_of_text

    def arrays(self) -> Rows:
        """Returns the work of the rows in the next step, in new arrays: the devices may read them later."""
        n = len(self.rows)
        token, position, temperature = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.float32)
        pages, key = np.zeros((n, self.pages_of_text), np.int32), np.zeros((n, 2), np.uint32)
        for i, row in enumerate(self.rows):
            if row is not None:
                prompt, position[i] = row.request.prompt, row.position
                token[i] = prompt[row.position] if row.position < len(prompt) else NO_BYTE
                temperature[i], key[i] = row.request.temperature, row.request.key
                pages[i, : len(row.pages)] = row.pages
        return Rows(token, position, pages, key, temperature)

    def note(self, step: int, last: Any) -> None:
        """Notes where the bytes of a step will be, and ends texts. To find stop bytes, it reads the last step's bytes.

        So a text with a stop byte takes part in one more step; `on_host` ignores its byte of that step.
        """
        read = None
        for i, row in enumerate(self.rows):
            if row is None:
                continue
            request, row.position = row.request, row.position + 1
            if row.position >= len(request.prompt):
                row.places.append((step, i))
            is_stopped = False
            if request.stop != NO_BYTE and row.position > len(request.prompt):
                read = mpmd.device_get(last) if read is None else read
                is_stopped = read[i] == request.stop
            if is_stopped or len(row.places) == request.length:
                self.free_pages += row.pages
                self.rows[i] = None


class Started(NamedTuple):
    """Texts in progress: the arrays that each step draws, and for each text the (step, row) of its bytes."""

    requests: Sequence[Request]
    steps: list[Text]
    places: list[list[tuple[int, int]]]


@dataclasses.dataclass
class Sampler:
    """Writes texts, with caches that stay from call to call. Its programs have one shape, whatever texts come.

    Attributes:
      model: the GPT, with its layers.
      jit: `jax.jit`, or `mpmd.jit` for a mesh. In several processes, all make the same calls.
      lanes: the number of lanes. One for each stage of the model keeps all groups busy.
      rows: the rows of a lane.
      window: bytes of the longest text with its prompt.
      page_size: bytes of a page.
      pages: the pages of a lane; 0 means the most that its rows can need.
      choices: the bytes that may be drawn.
    """

    model: GPT
    jit: Callable[..., Any]
    lanes: int
    rows: int
    window: int = WINDOW
    page_size: int = 16
    pages: int = 0
    choices: range = range(256)

    def __post_init__(self):
        if min(self.lanes, self.rows, self.window, self.page_size) < 1:
            raise ValueError("Sampler: lanes, rows, window and page_size must each be at least 1")
        pages_of_text = -(-self.window // self.page_size)
        self.pages = self.pages or self.rows * pages_of_text
        self._make_lane = functools.partial(Lane, self.rows, self.pages, pages_of_text)
        self._advance = self.jit(make_advance(self.model, self.choices), donate_argnums=1)
        heads = self.model.d_model // self.model.head_size
        pool = np.zeros((1 + self.pages, self.page_size, heads, self.model.head_size), np.float32)
        # Host arrays go to the groups that read them.
        self._caches = [[{"keys": pool, "values": pool}] * self.model.num_layers for _ in range(self.lanes)]
        self._last: list[Any] = [np.zeros(self.rows, np.int32)] * self.lanes

    def start(self, params: Any, requests: Sequence[Request]) -> Started:
        """Starts all steps, without waiting for the devices. Reads drawn bytes only for texts with a stop byte.

        Raises:
          ValueError: a text can never fit.
        """
        self.check(requests)
        started = Started(requests, [], [[] for _ in requests])
        waiting = collections.deque(zip(requests, started.places, strict=True))
        lanes = [self._make_lane() for _ in self._caches]
        while waiting or any(row for lane in lanes for row in lane.rows):
            self._admit(waiting, lanes)
            for i, lane in enumerate(lanes):
                if any(lane.rows):
                    self._caches[i], drawn = self._advance(params, self._caches[i], self._last[i], lane.arrays())
                    lane.note(len(started.steps), self._last[i])
                    started.steps.append(drawn)
                    self._last[i] = drawn.tokens
        return started

    def texts(self, params: Any, requests: Sequence[Request]) -> list[Text]:
        """Returns the text for each request. Raises as `start` does."""
        return on_host(self.start(params, requests))

    def layout(self, params: Any) -> Any:
        """Returns where a sampler with `mpmd.jit` reads parameters of these types: a tree of shardings."""
        args = params, self._caches[0], self._last[0], self._make_lane().arrays()
        return self._advance.lower(*args).compile().input_shardings[0][0]

    def _admit(self, waiting: collections.deque, lanes: Sequence[Lane]) -> None:
        """Starts texts in the order in which they wait, each in the lane with the most free rows that has room.

        A text takes all pages that it may need, so it never waits once it has started.
        """
        while waiting:
            num_pages = self._num_pages(waiting[0][0])
            lane = max(lanes, key=lambda lane: lane.rows.count(None) * (len(lane.free_pages) >= num_pages))
            if None not in lane.rows or len(lane.free_pages) < num_pages:
                return
            request, places = waiting.popleft()
            pages, lane.free_pages = lane.free_pages[:num_pages], lane.free_pages[num_pages:]
            lane.rows[lane.rows.index(None)] = Row(request, pages, places)

    def _num_pages(self, request: Request) -> int:
        """Returns how many pages a text takes. Its last byte is not read."""
        return -(-(len(request.prompt) + request.length - 1) // self.page_size)

    def check(self, requests: Sequence[Request]) -> None:
        """Raises a ValueError that names all requests which can never fit."""
        faults = []
        for i, request in enumerate(requests):
            prompt, length, num_pages = len(request.prompt), request.length, self._num_pages(request)
            if min(prompt, length) < 1 or prompt + length > self.window:
                limits = f"each must be at least 1, and both at most {self.window} together"
                faults.append(f"request {i} has a prompt of {prompt} bytes and a length of {length}; {limits}")
            elif num_pages > self.pages:
                faults.append(f"request {i} needs {num_pages} pages; a lane has {self.pages}")
        if faults:
            raise ValueError("Sampler: " + "\n  ".join(faults))


def on_host(started: Started) -> list[Text]:
    """Waits for the devices and returns the written texts."""
    if not started.steps:
        return []
    tokens, log_probabilities = map(np.stack, zip(*mpmd.device_get(started.steps), strict=True))
    texts = []
    for request, places in zip(started.requests, started.places, strict=True):
        where = tuple(np.transpose(places))
        written = tokens[where]
        stops = np.flatnonzero(written == request.stop)
        end = stops[0] + 1 if len(stops) else len(written)
        texts.append(Text(written[:end], log_probabilities[where][:end]))
    return texts


# The script.


def trained_params(model: GPT, mesh: mpmd.MpmdMesh, num_steps: int) -> Any:
    """Returns parameters after some steps of train_gpt.py's training, in the groups where the training leaves them."""
    text, optimizer = read_text([]), make_optimizer(3e-3, num_steps)
    state = mpmd.jit(make_init(model, optimizer), mpmd_mesh=mesh)(jax.random.key(0))
    train_step = make_step(model, optimizer, OneFOneB(model.num_stages), num_microbatches=4)
    step = mpmd.jit(train_step, mpmd_mesh=mesh, donate_argnums=0)
    for index in range(num_steps):
        state, metrics = step(state, batch_at(text, 0, index, rows=8, length=WINDOW + 1))
        if index % 50 == 0 or index + 1 == num_steps:
            loss = float(metrics["loss"])
            say(f"step {index + 1}/{num_steps}  loss {loss:.3f}")
    return state.params


def restored_params(model: GPT, sampler: Sampler, folder: str) -> Any:
    """Reads the parameters of the folder's last checkpoint directly into the groups where they are needed."""
    steps = [int(path.name) for path in Path(folder).glob("*") if path.name.isdigit()]
    if not steps:
        sys.exit(f"--checkpoint-dir {folder} has no checkpoint; train_gpt.py --checkpoint-dir saves some")
    params = jax.eval_shape(model.init, jax.random.key(0))
    path = Path(folder).absolute() / str(max(steps))
    layout = sampler.layout(params)
    return reshard.checkpoint.restore(path, {"params": params}, {"params": layout}, partial=True)["params"]


def say(text: str) -> None:
    """Prints the text once: among several processes, only process 0 prints."""
    if jax.process_index() == 0:
        print(text, flush=True)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="where train_gpt.py saved; default: train here first")
    parser.add_argument("--steps", type=int, default=200, help="training steps without --checkpoint-dir (default 200)")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages, one per group (default 4)")
    parser.add_argument("--layers", type=int, default=4, help="as given to train_gpt.py (default 4)")
    parser.add_argument("--d-model", type=int, default=128, help="as given to train_gpt.py (default 128)")
    parser.add_argument("--lanes", type=int, default=4, help="how many groups can work at once (default 4)")
    parser.add_argument("--rows", type=int, default=4, help="texts in a lane (default 4)")
    parser.add_argument("--pages", type=int, default=20, help="of 16 bytes, in a lane (default 20)")
    parser.add_argument("--texts", type=int, default=24, help="texts to write (default 24)")
    parser.add_argument("--prompt", default="def ", help="how the texts begin (default 'def ')")
    parser.add_argument("--length", type=int, default=100, help="bytes of the longest text (default 100)")
    args = parser.parse_args(argv)
    for name in ("steps", "stages", "lanes", "rows", "pages", "texts", "length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.layers < args.stages:
        parser.error(f"--layers {args.layers} is fewer than --stages {args.stages}; each stage needs a layer")
    if args.d_model < 32 or args.d_model % 32:
        parser.error(f"--d-model {args.d_model} is not a multiple of 32")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Trains or restores, then writes the texts in both ways. Returns the exit status: 1 if the texts differ."""
    args = parse_args(argv)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", args.stages)  # one CPU device for each group; does nothing to GPUs
    mpmd.initialize()
    mesh = make_mesh(args.stages, data_parallel=1)
    model = GPT(args.layers, args.d_model, num_stages=args.stages)

    jit = functools.partial(mpmd.jit, mpmd_mesh=mesh)
    requests = [  # of four lengths; the first one is greedy
        Request(args.prompt.encode(), -(-args.length * (4 - i % 4) // 4), (1, i), temperature=0.7 if i else 0.0)
        for i in range(args.texts)
    ]
    try:
        sampler = Sampler(model, jit, lanes=args.lanes, rows=args.rows, pages=args.pages)
        sampler.check(requests)  # now, and not after training
    except ValueError as error:
        sys.exit(str(error))
    if args.checkpoint_dir is None:
        params = trained_params(model, mesh, args.steps)
    else:
        params = restored_params(model, sampler, args.checkpoint_dir)

    ways = {
        "one text at a time": lambda: [sampler.texts(params, [request])[0] for request in requests],
        f"{args.lanes} lanes of {args.rows} rows": lambda: sampler.texts(params, requests),
    }
    sampler.texts(params, requests[-1:])  # compiles
    found = []
    for name, way in ways.items():
        started = time.perf_counter()
        found.append(way())
        speed = sum(len(text.tokens) for text in found[-1]) / (time.perf_counter() - started)
        say(f"{name}: {speed:,.0f} tokens/s")
    same = all(map(np.array_equal, *([text.tokens for text in texts] for texts in found)))
    say("the same texts" if same else "NOT the same texts")
    for text in found[-1][:4]:
        say("---\n" + args.prompt + text.tokens.astype(np.uint8).tobytes().decode(errors="replace"))
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, mpmd.ReshardError) as error:  # errors that a user can repair
        sys.exit(f"generate.py: {error}")
