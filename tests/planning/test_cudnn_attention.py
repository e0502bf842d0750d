"""Attention of the Llama examples on H100s that are not here: cuDNN's kernel, what it costs and spares."""

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plugins import needs_plugin

import mpmd
from mpmd.costs.machine import Machine
from mpmd.costs.traffic import traffic_of
from mpmd.costs.work import work_of
from mpmd.graphs.axis_rules import factors
from mpmd.planning.plan import plan_step

HAS_CUDNN = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
needs_cudnn = pytest.mark.skipif(not HAS_CUDNN, reason="needs cuDNN: pip install '.[topology]'")
EXAMPLES = Path(__file__).parents[2] / "examples"
CALLS = r"custom_call_target=\"__cudnn\$fmhaSoftmax(Backward)?\""


@pytest.fixture(scope="module")
def examples():
    """The modules plan_llama and llama.attention."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("plan_llama"), importlib.import_module("llama.attention")
    sys.path.remove(str(EXAMPLES))


def has_square(text, length):
    """Whether a program has an array with two axes of the length."""
    return re.search(rf"\[(\d+,)*{length}(,\d+)*,{length}(,\d+)*\]", text) is not None


def mesh_of(groups, devices=8, types=AxisType.Auto):
    return mpmd.topology_mesh(
        "h100", (groups, devices), ("stage", "data"), "stage", devices_per_host=devices, axis_types=(types,) * 2
    )


def compiled_for(plan_llama, shape, groups, microbatches):
    step, arguments = plan_llama.build(shape, mesh_of(groups), "1f1b", microbatches)
    return step.lower(*arguments).compile()


def texts(compiled):
    return {
        (s, kind): compiled.as_text(stage=s, kind=kind) for s in range(compiled.program.num_stages) for kind in "FB"
    }


LENGTH = 1536  # which no other axis of the programs has
LLAMA_8B = {"width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336}
PAIRS = 32 * 8192 * 8192  # of a query and a key, in all heads of a row
SCORE = 4 + 4 + 4 + 4 + 2 + 2  # bytes: written, read for the maximum, the sum and the weight, which is written and read


# --- which programs -------------------------------------------------------------------------------


@needs_plugin
@needs_cudnn
def test_each_program_of_a_step_for_h100s_has_cudnns_kernel(examples):
    shape = examples[0].Shape(layers=2, **LLAMA_8B, vocabulary=4096, length=LENGTH)
    for (_, kind), text in texts(compiled_for(examples[0], shape, 2, 2)).items():
        calls = [bool(m[1]) for m in re.finditer(CALLS, text)]
        assert calls == ([False] if kind == "F" else [False, True])  # forward is computed again
        assert not has_square(text, LENGTH)


@needs_plugin
def test_without_cudnn_the_same_step_is_in_chunks_and_says_why(examples, monkeypatch, capsys):
    def missing(*_, **__):
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    shape = examples[0].Shape(layers=2, **LLAMA_8B, vocabulary=4096, length=LENGTH)
    for text in texts(compiled_for(examples[0], shape, 2, 2)).values():
        assert not re.search(CALLS, text)
        assert not has_square(text, LENGTH)
    assert (
        "attention in chunks of 512 queries, without a kernel:"
        " JAX says: cuDNN not found. Install it: pip install nvidia-cudnn-cu12"
    ) in capsys.readouterr().err.splitlines()


@needs_plugin
@needs_cudnn
def test_windows_of_layers_in_a_scan_are_kernels_of_their_own_and_segments_and_caps_are_in_chunks(examples):
    attend = examples[1].attend
    rows = NamedSharding(mesh_of(1).groups[0], P("data"))
    q, k = (jax.ShapeDtypeStruct((8, LENGTH, heads, 64), jnp.bfloat16, sharding=rows) for heads in (8, 2))
    documents = jax.ShapeDtypeStruct((8, LENGTH), jnp.int32, sharding=rows)

    def text(*more, windows=(0,), **about):
        def value(q, k, v, *more):
            def layer(q, window):
                one = functools.partial(attend, scale=0.1, windows=tuple(sorted({*windows})), kernel=True, **about)
                return one(q, k, v, window=window, segments=more[0] if more else None), None

            return jnp.sum(jax.lax.scan(layer, q, jnp.array(windows))[0].astype(jnp.float32))

        made = jax.jit(jax.grad(value, (0, 1, 2)), compiler_options={"xla_gpu_autotune_level": 0})
        return made.lower(q, k, k, *more).compile().as_text()

    found = text(windows=(0, 128, 0, 128))
    lengths = re.findall(r'"sliding_window_length": (\d+)', found)
    assert len(re.findall(CALLS, found)) == 4 and set(lengths) == {"0", "128"}, lengths
    for other in (text(documents), text(cap=50.0)):
        assert not re.search(CALLS, other)
        assert not has_square(other, LENGTH)


@needs_plugin
@pytest.mark.parametrize(
    ("types", "kv_heads", "size", "dtype", "fault"),
    [
        (AxisType.Explicit, 8, 128, jnp.bfloat16, "Explicit axes"),
        (AxisType.Auto, 8, 128, jnp.float32, "Q must be fp16/bf16"),
        (AxisType.Auto, 8, 512, jnp.bfloat16, "The head dim must be <= "),
        (AxisType.Auto, 8, 128, jnp.bfloat16, None),
    ],
)
@needs_cudnn
def test_where_there_is_no_kernel_the_reason_is_said(examples, types, kv_heads, size, dtype, fault):
    found = examples[1].kernel_fault(mesh_of(1, types=types), kv_heads, size, dtype)
    assert found is None if fault is None else fault in found


@needs_plugin
def test_packed_documents_have_a_kernel_on_gpus_if_asked_for(examples):
    attend = examples[1].attend
    mesh = mesh_of(1).groups[0]
    rows = NamedSharding(mesh, P("data"))
    q, k = (jax.ShapeDtypeStruct((8, LENGTH, heads, 64), jnp.bfloat16, sharding=rows) for heads in (4, 2))
    documents = jax.ShapeDtypeStruct((8, LENGTH), jnp.int32, sharding=rows)

    def value(q, k, v, documents):
        return jnp.sum(attend(q, k, v, scale=0.1, segments=documents, packed="compiled").astype(jnp.float32))

    with jax.set_mesh(mesh):
        made = jax.jit(jax.grad(value, (0, 1, 2)), compiler_options={"xla_gpu_autotune_level": 0})
        text = made.lower(q, k, k, documents).compile().as_text()
    calls = re.findall(r"custom_call_target=\"__gpu\$xla.gpu.triton\"", text)
    assert len(calls) == 3  # forward, and two of the backward
    assert not has_square(text, LENGTH)


@pytest.mark.slow
def test_the_kernel_for_packed_documents_has_the_numbers_of_chunks(examples):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 64, heads, 16)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    documents = jnp.array([[0] * 20 + [1] * 44, [0] * 50 + [1] * 14])

    def values(packed):
        def one(*x):
            return examples[1].attend(*x, scale=0.25, segments=documents, packed=packed)

        out, back = jax.vjp(one, q, k, v)
        return out, *back(jnp.cos(out))

    for got, want in zip(values("interpreted"), values(""), strict=True):
        assert jnp.max(jnp.abs(got - want)) < 1e-5


@pytest.mark.parametrize(
    ("kv_heads", "size", "windows", "length", "fault"),
    [
        (8, 128, (0,), 8192, None),
        (8, 128, (0,), 96, None),
        (8, 128, (0, 512), 8192, "JAX's kernel for packed documents has no windows"),
        (8, 96, (0,), 8192, "heads of 96 are no power of 2"),
        (8, 128, (0,), 8200, "rows of 8200 tokens are no multiple of 128"),
    ],
)
def test_where_packed_documents_have_no_kernel_the_reason_is_said(examples, kv_heads, size, windows, length, fault):
    mesh = mpmd.MpmdMesh(jax.make_mesh((1, 1), ("stage", "data"), devices=jax.devices()[:1]), "stage")
    assert examples[1].packed_fault(mesh, kv_heads, size, windows, length) == fault


# --- what it costs --------------------------------------------------------------------------------


@needs_plugin
@needs_cudnn
@pytest.mark.parametrize(("window", "seen"), [(0, 1024 * 1025 / 2), (100, 1024 * 100 - 100 * 99 / 2)])
def test_the_kernels_work_is_two_and_five_products_over_the_pairs_that_see_each_other(examples, window, seen):
    q, k = (jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16) for heads in (8, 2))
    one = functools.partial(examples[1].attend, scale=0.1, windows=(window,), kernel=True)
    product = 2 * 2 * 8 * 64 * seen  # rows, heads, size
    assert work_of(jax.make_jaxpr(one)(q, k, k).jaxpr).products == 2 * product
    jaxpr = jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(one(*x).astype(jnp.float32)), (0, 1, 2)))(q, k, k).jaxpr
    work = work_of(jaxpr)
    assert (work.products, work.attention, work.float32) == ((2 + 5) * product, (2 + 5) * product, 0)
    wide, narrow, sums = 2 * 1024 * 8 * 64 * 2, 2 * 1024 * 2 * 64 * 2, 2 * 1024 * 8 * 4
    forward, backward = 2 * wide + 2 * narrow + sums, 4 * wide + 4 * narrow + sums
    assert work.nbytes == pytest.approx(forward + backward, rel=0.3)  # and what is around it
    kernels = [eqn for eqn in jaxpr.eqns if "dot_product_attention" in eqn.primitive.name]
    assert [[f.outs for f in factors(eqn)] for eqn in kernels] == [[(0, 0)], [(0, 0, 0)]]  # rows


@needs_plugin
@needs_cudnn
@pytest.mark.slow
def test_llama_3_8b_is_faster_with_the_kernel_by_what_the_traffic_of_scores_says(examples, monkeypatch):
    """At 8k on 64 H100s. In chunks, each score is written in float32, read for the maximum, for the sum and for its
    weight, which is written and read in bfloat16; keys and values are read in float32 and written in bfloat16 for each
    chunk. The kernel holds no scores, and does the products of half of them.
    """
    plan_llama, machine = examples[0], Machine(mpmd.Target.named("h100"))

    def planned():
        step, arguments = plan_llama.llama3_8b(mesh_of(8), num_microbatches=16)
        compiled = step.lower(*arguments).compile()
        return plan_step(compiled._programs, compiled.program, machine)

    kernel = planned()
    monkeypatch.setattr(plan_llama, "kernel_fault", lambda *_: "not asked for")
    chunks = planned()
    assert chunks.step.seconds > 2 * kernel.step.seconds
    for plan in (kernel, chunks):
        assert plan.loops[0].cuts[2] == 4  # layers of stage 2
    found = chunks.groups[2].tasks["F2"].seconds - kernel.groups[2].tasks["F2"].seconds
    converted = 8192 // 512 * 2 * 8192 * 1024 * (4 + 2)
    traffic = machine.memory_s(4 * (PAIRS * SCORE + converted))
    products = 4 * 2 * 2 * 128 * (PAIRS / 2) / (machine.target.flops * machine.attention_fraction)
    assert found == pytest.approx(traffic - products, rel=0.08)


@needs_plugin
def test_the_traffic_of_scores_in_chunks_is_what_a_person_counts_or_what_xla_writes_beside_it(examples):
    rows = NamedSharding(mesh_of(1).groups[0], P("data"))
    q, k = (jax.ShapeDtypeStruct((8, 2048, heads, 64), jnp.bfloat16, sharding=rows) for heads in (8, 2))
    made = jax.jit(
        lambda q, k, v: examples[1].attend(q, k, v, scale=0.1), compiler_options={"xla_gpu_autotune_level": 0}
    )
    scores = 8 * 2048 * 2048  # of a row, of which each device has one
    counted = SCORE - (4 + 2)  # products write scores, and read weights
    found = traffic_of(made.lower(q, k, k).compile().as_text()) / scores
    assert counted < found < counted + 4 + 4 + 3  # masked scores may be written and read once more


# --- what it holds --------------------------------------------------------------------------------


@needs_plugin
@needs_cudnn
@pytest.mark.slow
def test_at_32k_the_planned_memory_is_what_a_person_counts(examples):
    """Layers of Llama 3 8B in two stages, one row of 32,768 tokens a device, which share the parameters among eight."""
    length, width, hidden, vocabulary = 32768, 4096, 14336, 128256
    shape = examples[0].Shape(layers=4, **LLAMA_8B, vocabulary=vocabulary, length=length)
    compiled = compiled_for(examples[0], shape, 2, 4)
    layers = compiled._programs.loops[0].loop.partition.info.cuts[0]
    mlp, attention = 3 * width * hidden, 2 * width * width + 2 * width * 1024
    ours = layers * (mlp + attention + 2 * width) // 8  # of a stage's parameters, a device's part
    row = length * width * 2  # bytes of what is between two layers
    found = compiled.memory_analysis()[0]
    embedding = vocabulary * width // 8
    assert found["parameters"] == found["gradients"] == 2 * (ours + embedding)
    assert found["state"] == 8 * (ours + embedding)
    assert found["activations"] == (2 * layers + 1) * row  # of two microbatches, and what is sent
    inside = 6 * length * hidden * 2  # of an MLP: gate, up and their product, with their gradients
    gathered = 2 * mlp * 2  # its parameters and their gradients
    temporaries = inside + 4 * row + gathered + 8 * 2 * embedding  # x, its norm, their gradients; that of the embedding
    assert found["temporaries"] == pytest.approx(temporaries, rel=0.1)
    assert found["peak"] == pytest.approx(12 * (ours + embedding) + found["activations"] + temporaries, rel=0.1)
    for text in texts(compiled).values():
        assert not has_square(text, length)
