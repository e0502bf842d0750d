"""Writes text with the byte-level GPT of train_gpt.py. Each layer and its cache stay in the layer's pipeline group.

    python examples/generate.py                             # trains for a minute, then writes
    python examples/train_gpt.py --checkpoint-dir run && python examples/generate.py --checkpoint-dir run

It writes the same texts twice. First it handles one request after the other, by a function without a loop: each byte
waits for the previous one, so only one group works at a time. Then it handles all requests at once: `treduce` takes a
byte of each request in turn, and the groups work on different requests. Both use the unchanged model. In contrast to
training, there are caches: each layer has arrays with the keys and values of all bytes so far, which every call takes
and returns.
"""

import argparse
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
from scheduler import GPipe, OneFOneB

WINDOW = 128  # bytes for which a cache has room


class Request(NamedTuple):
    """Some texts that grow together. When several requests are in flight, axis 0 of each array counts the requests.

    Attributes:
      tokens: (rows, length), the bytes that the model has not read yet: first the prompt, later only the last byte.
      position: (), the position of the first of these bytes in its text.
      key: (), determines the random choices, together with the position.
    """

    tokens: Any
    position: Any
    key: Any


class Drawn(NamedTuple):
    """The next byte of each text of a request: (rows, 1), and the logarithm of the probability with which it came."""

    tokens: Any
    log_probability: Any


def empty_caches(model: GPT, rows: int, window: int = WINDOW) -> list[dict[str, np.ndarray]]:
    """Keys and values for each layer, (rows, window, heads, features). Host arrays go to the groups that read them."""
    shape = (rows, window, model.d_model // model.head_size, model.head_size)
    return [{name: np.zeros(shape, np.float32) for name in ("keys", "values")} for _ in range(model.num_layers)]


def make_advance(model: GPT, temperature: float = 0.7, choices: range = range(256)) -> Callable[..., tuple[Any, Drawn]]:
    """A function that reads the new bytes of a request, and draws the next byte of each of its texts.

    Args:
      model: it computes the logits.
      temperature: they are divided by it.
      choices: the bytes that may be drawn.
    """

    def advance(params: dict[str, Any], caches: list[dict[str, jax.Array]], request: Request):
        start, length = request.position, request.tokens.shape[1]
        window = caches[0]["keys"].shape[1]
        seen = jnp.arange(window) <= (start + jnp.arange(length))[:, None]
        x = params["embed"][request.tokens] / EMBED_SCALE
        new_caches = []
        for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
            query, *new = model.heads(layer, x, start)
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(cache[name], entry, start, axis=1)
                for name, entry in zip(("keys", "values"), new, strict=True)
            )
            attended = jax.nn.dot_product_attention(query, keys, values, mask=seen[None, None])
            x = x + attended.reshape(x.shape) @ layer["out"]
            x = x + model.mlp(layer, x)
            if model.ends_stage(index):
                x = mpmd.mark_stage_end(x)
            new_caches.append({"keys": keys, "values": values})
        logits = (rms_norm(x[:, -1], params["norm"]) @ params["embed"].T)[:, choices.start : choices.stop]
        index = jax.random.categorical(jax.random.fold_in(request.key, start + length), logits / temperature)[:, None]
        log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits / temperature), index, axis=1)
        return new_caches, Drawn(index + choices.start, log_probability)

    return advance


def draw(advance: Callable, params: Any, caches: Any, request: Request, length: int) -> list[Drawn]:
    """The next `length` bytes, one after the other: (…, rows, 1). Nothing is read by the host, so calls run ahead."""
    drawn = []
    for _ in range(length):
        caches, new = advance(params, caches, request)
        request = Request(new.tokens, request.position + request.tokens.shape[-1], request.key)
        drawn.append(new)
    return drawn


def on_host(drawn: Sequence[Drawn]) -> Drawn:
    """What was drawn, in one array each: (…, rows, length)."""
    return Drawn(*(np.concatenate(parts, axis=-1) for parts in zip(*mpmd.device_get(drawn), strict=True)))


def write(advance: Callable, params: Any, caches: Any, request: Request, length: int) -> np.ndarray:
    """The next `length` bytes, (…, rows, length)."""
    return on_host(draw(advance, params, caches, request, length)).tokens


def stacked(trees: Sequence[Any]) -> Any:
    """The trees as one tree, with a new axis 0 in each array."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def trained_params(model: GPT, mesh: mpmd.MpmdMesh, num_steps: int) -> Any:
    """Parameters after some steps of train_gpt.py's training, in the groups in which the training leaves them."""
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


def restored_params(model: GPT, advance: Any, request: Request, folder: str) -> Any:
    """The parameters of the last checkpoint in the folder, read directly into the groups where `advance` needs them."""
    steps = [int(path.name) for path in Path(folder).glob("*") if path.name.isdigit()]
    if not steps:
        sys.exit(f"--checkpoint-dir {folder} has no checkpoint; train_gpt.py --checkpoint-dir saves some")
    params = jax.eval_shape(model.init, jax.random.key(0))
    compiled = advance.lower(params, empty_caches(model, request.tokens.shape[0]), request).compile()
    layout = compiled.input_shardings[0][0]
    path = Path(folder).absolute() / str(max(steps))
    return reshard.checkpoint.restore(path, {"params": params}, {"params": layout}, partial=True)["params"]


def say(text: str) -> None:
    """Prints the text once: among several processes, only process 0 prints."""
    if jax.process_index() == 0:
        print(text, flush=True)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="where train_gpt.py saved; default: train here first")
    parser.add_argument("--steps", type=int, default=200, help="training steps without --checkpoint-dir (default 200)")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages, one per group (default 4)")
    parser.add_argument("--layers", type=int, default=4, help="as given to train_gpt.py (default 4)")
    parser.add_argument("--d-model", type=int, default=128, help="as given to train_gpt.py (default 128)")
    parser.add_argument("--requests", type=int, default=4, help="requests in flight (default 4)")
    parser.add_argument("--rows", type=int, default=4, help="texts in a request (default 4)")
    parser.add_argument("--prompt", default="def ", help="how the texts begin (default 'def ')")
    parser.add_argument("--length", type=int, default=100, help="bytes to write (default 100)")
    args = parser.parse_args(argv)
    if not 1 <= args.length <= (room := WINDOW - len(args.prompt.encode())) or not args.prompt:
        parser.error(
            f"--length is {args.length}; a cache has room for 1 to {room} bytes behind a prompt that is not empty"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Trains or restores, then writes the texts in both ways. Returns the exit status: 1 if the texts differ."""
    args = parse_args(argv)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", args.stages)  # one CPU device for each group; does nothing to GPUs
    mpmd.initialize()
    mesh = make_mesh(args.stages, data_parallel=1)
    model = GPT(args.layers, args.d_model, num_stages=args.stages)

    prompt = np.frombuffer(args.prompt.encode(), np.uint8).astype(np.int32)
    tokens = np.broadcast_to(prompt, (args.rows, len(prompt)))
    requests = [Request(tokens, np.int32(0), key) for key in jax.random.split(jax.random.key(1), args.requests)]
    advance = make_advance(model)
    advance_one = mpmd.jit(advance, mpmd_mesh=mesh, donate_argnums=1)

    @mpmd.jit(mpmd_mesh=mesh, donate_argnums=1)
    def advance_all(params, caches, requests):
        schedule = GPipe(args.stages)
        return mpmd.treduce(lambda x: advance(params, *x), (caches, requests), schedule=schedule, operation=mpmd.Concat)

    if args.checkpoint_dir is None:
        params = trained_params(model, mesh, args.steps)
    else:
        params = restored_params(model, advance_one, requests[0], args.checkpoint_dir)

    def one_after_the_other(length):
        caches = [empty_caches(model, args.rows) for _ in requests]
        return np.stack([write(advance_one, params, *both, length) for both in zip(caches, requests, strict=True)])

    def all_at_once(length):
        caches = stacked([empty_caches(model, args.rows) for _ in requests])
        return write(advance_all, params, caches, stacked(requests), length)

    ways = {"one request at a time": one_after_the_other, f"{args.requests} requests in flight": all_at_once}
    texts = {}
    for name, way in ways.items():
        way(2)  # compiles the program for the prompt and the program for one byte
        started = time.perf_counter()
        texts[name] = way(args.length)
        speed = texts[name].size / (time.perf_counter() - started)
        say(f"{name}: {speed:,.0f} tokens/s")
    first, second = texts.values()
    say("the same text" if (same := np.array_equal(first, second)) else "NOT the same text")
    for request in first:
        say("---\n" + args.prompt + request[0].astype(np.uint8).tobytes().decode(errors="replace"))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
