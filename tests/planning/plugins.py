"""Marks of tests that need a compiler for devices that are not here."""

import importlib.util

import pytest

HAS_CUDA = importlib.util.find_spec("jax_plugins") is not None and any(
    importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)
)
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_plugin = pytest.mark.skipif(not HAS_CUDA, reason="needs JAX's CUDA plugin: pip install '.[topology]'")
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="needs XLA's compiler for TPUs: pip install libtpu")
