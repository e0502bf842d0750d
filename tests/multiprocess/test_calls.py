"""The calls of all ranks are compared: the steps, their order, and what they are given from the host."""

import copy
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpmd
from mpmd import _jax_compat as compat
from mpmd.errors import RankLostError, ScheduleError
from mpmd.job.activity import Activity
from mpmd.job.calls import MAX_AHEAD, Calls, SharedCalls
from mpmd.job.disagreement import disagreement
from mpmd.job.notes import Note
from mpmd.run.agreement import values_to_compare
from mpmd.tracing.arguments import argument_names, fixed_ways

NUM_CALLS, FIRST_UNLIKE = 6, 3
SAME_VALUES = (
    "  Host arrays, numbers and keys are given alike in every process. What each has a part of is an MpmdArray, or a"
    " jax.Array made by jax.make_array_from_process_local_data. A state is the result of the same call in every"
    " process. If one process made a call more than the others, this is where they begin to differ."
)
SAME_CALLS = (
    "  Every process makes the same calls in the same order: steps, evaluations, device_get, reshards, saves, restores."
    " Other static arguments, shapes or dtypes make another program of a step."
)


class Store:
    """The key-value store of a job, in this process."""

    def __init__(self):
        self.data = {}

    def key_value_set(self, key, text, allow_overwrite=False):
        assert allow_overwrite or key not in self.data
        self.data[key] = text

    def key_value_dir_get(self, folder):
        return [(key, text) for key, text in self.data.items() if key.startswith(folder)]


def train(x, y, lr=0.1, *, more=None, mode="train"):
    """The step of these tests; it never runs."""


def evaluate(x, y, lr=0.1, *, more=None, mode="train"):
    """Another one."""


MESH = mpmd.MpmdMesh.from_groups([jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])] * 2)
STEPS = {f.__name__: mpmd.jit(f, mpmd_mesh=MESH, static_argnames="mode") for f in (train, evaluate)}
DONATING = mpmd.jit(train, mpmd_mesh=MESH, static_argnames="mode", donate_argnames="more")
PROGRAMS = {}  # number of each program, the same in all ranks


def called(step, args, kwargs, number=0):
    """The note of a call, made of what `mpmd.jit` reads of its arguments."""
    jitted = STEPS.get(step, DONATING)
    call = jitted._read(args, kwargs)
    program = PROGRAMS.setdefault((id(jitted), call.key), len(PROGRAMS) + 1)
    leaves = zip(call.leaves, call.types, strict=True)
    given = [(i, x if isinstance(x, jax.Array) else np.array(x, t[1])) for i, (x, t) in enumerate(leaves)]
    names = argument_names(jitted._fun, call)
    types = [compat.shaped_array(x) for x in call.leaves]
    values, structure = values_to_compare(given, False), {"the arguments": f"in the structure {call.tree}"}
    return Note(
        f"called {jitted.__name__}", program, number, names, types, values, (), fixed_ways(jitted._fun, call), structure
    )


def arguments(number):
    """Of call `number`, as every rank gives them."""
    random = np.random.default_rng(number)
    more = {
        "key": jax.random.key(number),
        "raw": np.array([number, 7], np.uint32),
        "scale": jnp.float32(number),
        "flag": True,
        "count": number,
        "mask": random.random(64) > 0.5,
        "half": random.normal(size=16).astype(ml_dtypes.bfloat16),
        "wave": random.normal(size=8).astype(np.complex64),
        "large": random.normal(size=(16, 300)).astype(np.float32),
        "list": [random.normal(size=3), np.float64(number)],
    }
    return [random.normal(size=(16, 8)).astype(np.float32), random.integers(0, 9, (16, 8))], {
        "lr": 0.5**number,
        "more": more,
    }


def edit(**changes):
    """A way to differ in arguments: by name, what makes another value of this one."""

    def edited(args, kwargs):
        for name, change in changes.items():
            if name in "xy":
                args["xy".index(name)] = change(args["xy".index(name)])
            elif name in ("lr", "mode"):
                kwargs[name] = change(kwargs.get(name))
            else:
                kwargs["more"][name] = change(kwargs["more"][name])

    return edited


def put(value, index=(0, 0)):
    """Puts one number into an array."""

    def change(x):
        x = x.copy()
        x[index] = value
        return x

    return change


def swap(args, kwargs):
    args[0], kwargs["more"]["large"] = kwargs["more"]["large"][:16, :8], kwargs["more"]["large"].copy()
    kwargs["more"]["large"][:16, :8] = args[0][::-1]


def renamed(args, kwargs):
    kwargs["more"]["other"] = kwargs["more"].pop("wave")


def by_keyword(args, kwargs):
    kwargs["y"] = args.pop()


def shuffled(x):
    return x[np.random.default_rng(99).permutation(len(x))]


def nan(payload):
    return np.array(0x7FC00000 + payload, np.uint32).view(np.float32)[()]


# Per way, the edit of the arguments, and the arguments that are named.
VALUES = {
    "shuffled rows": (edit(x=shuffled), "x"),
    "shuffled labels": (edit(y=shuffled), "y"),
    "shuffled together": (edit(x=shuffled, y=shuffled), "x, y"),
    "two rows of the labels in turn": (edit(y=lambda y: y[[1, 0, *range(2, 16)]]), "y"),
    "a row twice": (edit(x=lambda x: x[[0, 0, *range(2, 16)]]), "x"),
    "another batch": (edit(x=lambda x: x + 1), "x"),
    "augmented otherwise": (edit(x=lambda x: x[:, ::-1]), "x"),
    "transposed": (edit(x=lambda x: x.reshape(8, 16).T), "x"),
    "one unit in the last place": (edit(x=lambda x: put(np.nextafter(x[1, 1], np.float32(9)), (1, 1))(x)), "x"),
    "the sign of zero": (edit(x=put(-0.0)), "x"),
    "a NaN": (edit(x=put(np.nan)), "x"),
    "the payload of a NaN": (edit(x=put(nan(3), (0, 1))), "x"),
    "one element of a large array": (edit(large=put(3.0, (15, 299))), "more['large']"),
    "learning rate": (edit(lr=lambda lr: lr * 1.5), "lr"),
    "a number of the step": (edit(count=lambda n: n + 1), "more['count']"),
    "a flag": (edit(flag=lambda flag: not flag), "more['flag']"),
    "a mask": (edit(mask=np.logical_not), "more['mask']"),
    "a key": (edit(key=lambda key: jax.random.fold_in(key, 1)), "more['key']"),
    "a raw key": (edit(raw=lambda key: key + np.uint32(1)), "more['raw']"),
    "a scalar on a device": (edit(scale=lambda x: x + 1), "more['scale']"),
    "bfloat16": (edit(half=lambda x: -x), "more['half']"),
    "complex": (edit(wave=np.conj), "more['wave']"),
    "in a list": (edit(list=lambda xs: [xs[0], xs[1] + 1]), "more['list'][1]"),
}
# Per way, the edit of the arguments, and per argument its types in rank 1 and in the others.
OTHER_TYPES = {
    "other dtype": (edit(x=lambda x: x.astype(np.float16)), {"x": ("as float16[16,8]", "as float32[16,8]")}),
    "other shapes": (
        edit(x=lambda x: x[:8], y=lambda y: y[:8]),
        {"x": ("as float32[8,8]", "as float32[16,8]"), "y": ("as int32[8,8]", "as int32[16,8]")},
    ),
    "a scalar with an axis": (
        edit(count=lambda n: np.array([n])), {"more['count']": ("as int32[1]", "as int32[] (weak type)")}
    ),
    "other names in a dict": (
        renamed,
        {"more['wave']": ("not at all", "as complex64[8]"), "more['other']": ("as complex64[8]", "not at all")},
    ),
    "one leaf less": (edit(wave=lambda x: None), {"more['wave']": ("not at all", "as complex64[8]")}),
    "a number of numpy for one of Python": (  # of another strength in promotions
        edit(lr=np.float32), {"lr": ("as float32[]", "as float32[] (weak type)")}
    ),
}  # fmt: skip
# Per way, the edit of the arguments, and what is told first.
OTHER_PROGRAM = {
    "a tuple for a list": (
        edit(list=tuple),
        "gave the arguments ...nt': *, 'flag': *, 'half': *, 'key': *, 'large': *, 'list': (*, *), ",
    ),
    "a static value": (edit(mode=lambda mode: "test"), "gave mode as 'test', ranks 0 and 2 not at all"),
    "a static value of another type": (edit(mode=lambda mode: 1.0), "gave mode as 1.0, ranks 0 and 2 not at all"),
    "an argument by keyword": (
        by_keyword, "gave keyword arguments (lr, more, y), ranks 0 and 2 (lr, more) in step 4 (train)"
    ),
}  # fmt: skip
TRAIN, EVALUATE, GET = "train", "evaluate", Note("came to mpmd.device_get")
# Per way, what rank 1 does from call 3 on, where the others train, and what is said of it.
ORDERS = {
    "another branch": ([EVALUATE], "called evaluate"),
    "an evaluation left out": ([TRAIN, TRAIN, TRAIN, TRAIN, TRAIN], "called train"),
    "two steps in another order": ([EVALUATE, TRAIN], "called evaluate"),
    "a device_get of its own": ([GET, TRAIN], "came to mpmd.device_get"),
    "a reshard of its own": ([Note("came to a reshard")], "came to a reshard"),
    "the first call of another step": ([Note("called other")], "called other"),
    "a step that donates": (["donating"], "called train as another program"),
    "the end of the program": ([Note("came to the end of its program")], "came to the end of its program"),
}
ALIKE = {
    "the order of a dict": lambda args, kwargs: kwargs.update(more=dict(reversed(kwargs["more"].items()))),
    "memory in another order": edit(x=np.asfortranarray),
    "a view with steps": edit(x=lambda x: np.repeat(x, 2, 1)[:, ::2]),
    "double precision": edit(x=lambda x: x.astype(np.float64), y=lambda y: y.astype(np.int32)),
    "an array for a scalar": edit(list=lambda xs: [xs[0], np.array(xs[1])]),
    "a device for the host": edit(count=lambda n: n, raw=jnp.asarray),
    "a copy": lambda args, kwargs: kwargs.update(more=copy.deepcopy(kwargs["more"])),
}


def calls(rank, changed=None, order=None):
    """What a rank calls: it trains, with one evaluation in call 4."""
    for number in range(NUM_CALLS):
        args, kwargs = arguments(number)
        args[0][0, :2] = 0.0, nan(1)
        step = EVALUATE if number == FIRST_UNLIKE + 1 else TRAIN
        if rank == 1 and number >= FIRST_UNLIKE:
            if changed is not None:
                changed(args, kwargs)
            if order is not None and number - FIRST_UNLIKE < len(order):
                step = order[number - FIRST_UNLIKE]
        yield step if isinstance(step, Note) else called(step, args, kwargs, number + 1)


@functools.cache
def alike():
    """What a rank calls that does as the most do."""
    return tuple(calls(0))


def told(*ranks, late=()):
    """After which call all ranks are told of a difference, and what. A late rank begins when the others are through."""
    store = Store()
    streams = [SharedCalls(tuple(range(len(ranks))), r, store) for r in range(len(ranks))]
    lists = [list(of_rank) for of_rank in ranks]
    for r in set(range(len(ranks))).difference(late) if late else ():
        streams[r].notes.extend(lists[r])
    for number in range(NUM_CALLS):
        for r in late or range(len(ranks)):
            streams[r].notes.append(lists[r][number])
        while not all(note.is_ready for stream in streams for note in stream.notes):
            pass  # JAX computes keys meanwhile
        found = [stream.turn() for _ in range(4) for stream in streams][-len(ranks) :]
        if found[0] is not None:
            assert len(set(found)) == 1  # all ranks are told the same
            return number, found[0]
    assert not any(stream.notes for stream in streams)
    return NUM_CALLS, None


@pytest.mark.parametrize("way", VALUES)
def test_a_rank_that_gives_other_values_is_told_so_with_the_argument(way):
    change, named = VALUES[way]
    number, found = told(alike(), calls(1, change), alike())
    assert found is not None and (number, found.rank) == (FIRST_UNLIKE, 1)
    assert found.text == f"rank 1 gave other values of {named} than ranks 0 and 2 in step 4 (train)\n{SAME_VALUES}"


def test_a_rank_that_gives_a_host_value_for_an_array_on_devices_is_told_so():
    """Such as a learning rate that one rank sets on the host, where the others pass on the state of the last step."""
    on_devices = edit(x=lambda x: jax.device_put(x, NamedSharding(MESH.groups[0], PartitionSpec())))
    number, found = told(alike(), calls(1, on_devices), alike())
    assert found is not None and (number, found.rank) == (FIRST_UNLIKE, 1)
    line = "rank 1 gave x as an array on devices, ranks 0 and 2 from the host in step 4 (train)"
    assert found.text == f"{line}\n{SAME_VALUES}"


def test_a_rank_that_gives_a_large_array_of_a_device_for_one_of_the_host_is_told_so():
    """Its values are not compared after the first call, so they may be others."""
    number, found = told(alike(), calls(1, edit(large=jnp.asarray)), alike())
    assert found is not None and (number, found.rank) == (FIRST_UNLIKE, 1)
    line = "rank 1 gave more['large'] as an array on devices, ranks 0 and 2 from the host in step 4 (train)"
    assert found.text == f"{line}\n{SAME_VALUES}"


def test_a_rank_that_goes_on_from_an_older_state_is_told_so():
    def states(rank, older=0):
        for number, note in enumerate(calls(rank)):
            older = older or (rank == 1 and number >= FIRST_UNLIKE)
            yield dataclasses.replace(note, makers=[7, number - older, 0])

    number, found = told(*map(states, range(3)))
    assert found is not None and (number, found.rank) == (FIRST_UNLIKE, 1)
    line = "rank 1 gave other results as y than ranks 0 and 2 in step 4 (train)"
    assert found.text == f"{line}\n{SAME_VALUES}"


@pytest.mark.parametrize("way", OTHER_TYPES)
@pytest.mark.parametrize("is_first", [False, True], ids=["later", "first"])
def test_a_rank_that_gives_other_shapes_or_dtypes_is_told_so_with_the_argument(way, is_first):
    """Also where no program for them is there yet: that rank comes to a first call, the others to a later one."""
    change, types = OTHER_TYPES[way]
    others = list(calls(1, change))
    if is_first:
        others[FIRST_UNLIKE] = dataclasses.replace(others[FIRST_UNLIKE], program=0, values=())
    number, found = told(alike(), others, alike())
    assert found is not None and (number, found.rank) == (FIRST_UNLIKE, 1)
    head, *rest = [f"rank 1 gave {name} {there}, ranks 0 and 2 {here}" for name, (there, here) in types.items()]
    assert found.text == "\n".join([f"{head} in step 4 (train)", *(f"  {line}" for line in rest), SAME_CALLS])


@pytest.mark.parametrize("way", OTHER_PROGRAM)
def test_a_rank_whose_arguments_make_another_program_is_told_so(way):
    change, text = OTHER_PROGRAM[way]
    number, found = told(alike(), calls(1, change), alike())
    assert found is not None and (number, found.rank) == (FIRST_UNLIKE, 1)
    assert found.text.startswith(f"rank 1 {text}") and found.text.endswith(SAME_CALLS)


class BrokenStore(Store):
    def key_value_dir_get(self, folder):
        raise KeyError(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_the_thread_that_compares_ends_all_waiting_at_once(rank):
    ended = []
    calls = Calls(rank, 2, BrokenStore(), Activity(rank), lambda *verdict: ended.append(verdict), lambda epoch: None)
    calls.note((0, 1), Note("called train"))
    start = time.monotonic()
    for wait in (calls.settle, lambda: calls.note((0, 1), Note("called train"))):
        with pytest.raises(ScheduleError, match=f"^rank {rank} could not compare its calls .*: KeyError: 'mpmd/calls/"):
            wait()
    assert time.monotonic() - start < 5 and not ended
    calls.stop(5)


def test_nobody_waits_for_what_a_lost_rank_has_called():
    def check_ranks(epoch):
        raise RankLostError("rank 1 was lost")

    calls = Calls(0, 2, Store(), Activity(0), lambda *verdict: None, check_ranks)
    calls.note((0, 1), Note("called train"))
    with pytest.raises(RankLostError):
        calls.settle()
    calls.stop(5)


@pytest.mark.parametrize("way", ORDERS)
def test_a_rank_that_calls_something_else_is_told_so(way):
    order, did = ORDERS[way]
    number, found = told(alike(), calls(1, order=order), alike())
    first = next(i for i, step in enumerate(order) if step != (TRAIN, EVALUATE)[i == 1]) + FIRST_UNLIKE
    assert found is not None and (number, found.rank) == (first, 1)
    there = "called evaluate" if first == FIRST_UNLIKE + 1 else "called train"
    assert found.text == f"rank 1 {did} where ranks 0 and 2 {there}, in step {first + 1}\n{SAME_CALLS}"


@pytest.mark.parametrize("way", ALIKE)
def test_ranks_that_give_the_same_in_another_way_are_not_told_anything(way):
    assert told(alike(), calls(1, ALIKE[way]), alike())[1] is None


def test_a_rank_that_is_late_is_not_told_anything_and_one_that_differs_is_when_it_comes():
    """What the lowest rank and another one have said is kept until the last one comes."""
    assert told(alike(), alike(), calls(2), late=(2,))[1] is None
    number, found = told(alike(), calls(1, edit(x=shuffled)), late=(1,))
    assert found is not None and (number, found.rank) == (FIRST_UNLIKE, 1)
    assert NUM_CALLS < MAX_AHEAD


def test_all_parts_into_which_ranks_fall_are_named():
    def note(*values):
        return ["called train", 3, 5, {}, dict(zip("abc", values, strict=True)), {}, {}]

    found = disagreement({0: note(1, 7, 0), 1: note(1, 7, 1), 2: note(2, 7, 2), 3: note(1, 8, None)})
    assert found is not None and found.rank == 2
    assert found.text == (
        "rank 2 gave other values of a than ranks 0, 1 and 3 in step 5 (train)\n"
        "  rank 3 gave other values of b than ranks 0, 1 and 2\n"
        "  rank 1 and rank 2 gave other values of c than rank 0\n" + SAME_VALUES
    )
