"""Training states as stock Orbax saves them, and what it reads back, compared bit by bit."""

import hashlib
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

ROOT = Path(__file__).parents[2]


def stacked_params(num_layers=6):
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "embed": jax.random.normal(keys[0], (11, 4)),
        "layers": {
            "w": jax.random.normal(keys[1], (num_layers, 4, 8)).astype(jnp.bfloat16),
            "mlp": [jax.random.normal(keys[2], (num_layers, 8)), jnp.arange(num_layers, dtype=jnp.float32)],
        },
    }


def layered(params):
    """The same with a list of layers."""
    num_layers = params["layers"]["w"].shape[0]
    return params | {"layers": [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(num_layers)]}


def state_of(params):
    """What a training loop saves: optimizer states mirror the parameters at other prefixes."""
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    gradients = jax.tree.map(lambda x: x * 0.5, params)
    _, opt = optimizer.update(gradients, optimizer.init(params), params)
    return {
        "params": params,
        "opt": opt,
        "step": 7,
        "rate": 0.25,
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
        "host": np.arange(5, dtype=np.int16),
        "nothing": None,
        "empty": {"a": {}, "b": [], "c": ()},
    }


def save(folder, tree, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))
    return folder


def restore(folder):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder)


def bits(leaf):
    """A leaf as something that is equal if its bits, shape and dtype are; keys count as their data, as which stock
    Orbax restores them where it is not told devices.
    """
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return bits(jax.random.key_data(leaf))
    if isinstance(leaf, str):
        return leaf
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.map(bits, found) == jax.tree.map(bits, expected)


def fingerprint(folder):
    """Every file with its content and time, to see that nothing was touched."""
    return {
        file.relative_to(folder): (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in sorted(Path(folder).rglob("*"))
        if file.is_file()
    }


def command(*arguments, **options):
    """`python -m reshard …` in a process of its own."""
    line = [sys.executable, "-m", "reshard", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False, **options)
