"""A training step gives the same bits however its devices are spread over processes."""

import jobs
import numpy as np
import pytest

ONE_EACH, TWO_EACH = (4, 1), (2, 2)
GROUPS_OF_ONE = ("1f1b", "zb-h1")
SEVERAL_IN_A_PROCESS = ("interleaved", "zbv", "shared")
DATA_PARALLEL = ("pairs", "across", "explicit")
ODD = ("turned", "uneven")
# Several groups in a process, and groups over two; a group in each is in the jobs of test_resilience.py, too.
SLOW = [(("interleaved", "explicit"), [TWO_EACH])]
EXHAUSTIVE = [
    (GROUPS_OF_ONE, [ONE_EACH, TWO_EACH]),
    (SEVERAL_IN_A_PROCESS, [TWO_EACH]),
    (DATA_PARALLEL, [ONE_EACH]),
    (("pairs", *ODD), [TWO_EACH]),
    (ODD, [ONE_EACH]),
    (("across",), [(2, 4), (8, 1)]),
    (("recomputed",), [TWO_EACH]),
]


@pytest.mark.parametrize(
    ("cases", "layouts"),
    [
        pytest.param(*case, marks=mark)
        for chosen, mark in ((SLOW, pytest.mark.slow), (EXHAUSTIVE, pytest.mark.exhaustive))
        for case in chosen
    ],
    ids=lambda x: "+".join(x) if isinstance(x[0], str) else ",".join(f"{p}x{d}" for p, d in x),
)
def test_losses_and_state_do_not_depend_on_the_processes(cases, layouts):
    num_devices = layouts[0][0] * layouts[0][1]
    (alone,) = jobs.results("training.py", *cases, processes=1, devices=num_devices, external=False)
    for name in cases:
        plain = alone[name].pop("reference")
        assert_close(alone[name]["history"], plain)
    for processes, devices in layouts:
        found = jobs.results("training.py", *cases, processes=processes, devices=devices, limit_s=240)
        for rank, of_rank in enumerate(found):
            for name in cases:
                assert of_rank[name] == alone[name], f"{name} on {processes}x{devices}, rank {rank}"


def assert_close(history, plain):
    """The metrics of all steps against those of `jax.jit`, which adds in another order and may have one step more."""
    assert len(history) >= 3
    for step, expected in zip(history, plain, strict=False):
        assert step.keys() == expected.keys()
        for name, bits in step.items():
            value = np.frombuffer(bytes.fromhex(bits), np.int32 if name == "hits" else np.float32)[0]
            np.testing.assert_allclose(value, expected[name], rtol=2e-5)
