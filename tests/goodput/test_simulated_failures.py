"""Predicted goodput: against cases computed by hand, and at its limits."""

import dataclasses
import json
from pathlib import Path

import pytest

from mpmd.__main__ import main
from mpmd.goodput.simulated import FailureInputs, predicted, shares, spare_is_free, text_of

NO_FAILURES = FailureInputs(gpus=1024, failures_per_day=0, checkpoint_every_s=900, checkpoint_s=100)


def test_without_failures_only_checkpoints_cost():
    found = shares(NO_FAILURES, in_memory=False, in_place=False)
    assert found == pytest.approx((0.9, 0, 0, 0.1, 0, 0))


def test_a_failure_an_hour_by_hand():
    inputs = FailureInputs(
        gpus=1000, failures_per_day=24, step_s=10, checkpoint_every_s=1000, checkpoint_s=0, copy_s=0.1,
        detect_s=36, restart_s=324, from_memory_s=144, in_place_s=54, spares=8, host_repair_h=1,
    )  # fmt: skip
    found = predicted(inputs)
    # In 3,600 s: stopped for 360, and 500 of training again after the failures that come while it runs.
    assert found["checkpoints on disk"] == pytest.approx((0.9 * (1 - 500 / 3600), 0.1, 0.9 * 500 / 3600, 0, 0, 0))
    # Stopped for 180; of the rest 0.1 in 10.1 s for copies; 15 s again.
    copies, again = 0.95 * 0.1 / 10.1, 0.95 * 15 / 3600
    assert found["and copies in memory"] == pytest.approx((0.95 - copies - again, 0.05, again, 0, copies, 0))
    # One spare host, one being repaired on average: free for half of the failures. Stopped for 180 or 90.
    stopped = 135 / 3600
    copies, again = (1 - stopped) * 0.1 / 10.1, (1 - stopped) * 15 / 3600
    expected = [(1000 / 1008) * x for x in (1 - stopped - copies - again, stopped, again, 0, copies)]
    assert found["and spares"] == pytest.approx((*expected, 8 / 1008))


def test_shares_of_time_add_up_to_one_and_are_never_below_zero():
    for failures in (0, 1, 30, 200, 1e5):
        for of_job in predicted(
            dataclasses.replace(NO_FAILURES, failures_per_day=failures, copy_s=1, spares=16)
        ).values():
            assert sum(of_job) == pytest.approx(1) and min(of_job) >= 0


def test_more_failures_leave_less_and_each_way_to_go_on_more():
    by_rate = [list(predicted(FailureInputs(16384, rate, spares=400)).values()) for rate in (1, 2, 5, 10, 20)]
    for of_way in zip(*by_rate, strict=True):
        assert [x.useful for x in of_way] == sorted((x.useful for x in of_way), reverse=True)
    disk, memory, spares = by_rate[-1]
    assert disk.useful < memory.useful < spares.useful


@pytest.mark.parametrize(
    ("hosts", "busy", "free"), [(0, 1, 0), (1, 1, 1 / 2), (2, 1, 4 / 5), (1, 3, 1 / 4), (10**9, 9, 1)]
)
def test_the_share_of_failures_that_find_a_spare_is_erlangs(hosts, busy, free):
    inputs = FailureInputs(64, 24 * busy, spares=8 * hosts, gpus_per_host=8, host_repair_h=1)
    assert spare_is_free(inputs) == pytest.approx(free)


def test_ten_minutes_every_eighteen_leave_44_percent_as_meta_says_of_100_000_gpus():
    inputs = FailureInputs(98304, 80, checkpoint_every_s=1, checkpoint_s=0, detect_s=0, restart_s=600)
    assert 1 - shares(inputs, in_memory=False, in_place=False).stopped == pytest.approx(0.44, abs=0.005)


def test_the_figures_of_the_page_are_those_of_the_commands_beside_them(capsys):
    page = (Path(__file__).parents[2] / "docs" / "goodput.md").read_text()
    main("goodput --simulate --gpus 16384 --mtbf 50000".split())
    assert capsys.readouterr().out in page
    minutes = "--gpus 98304 --failures-per-day 80 --detect-s 0 --restart-s 600 --checkpoint-every-s 1 --checkpoint-s 0"
    assert f"`{minutes}`" in page
    for options, useful in [
        (minutes, "44.4%"), (minutes.replace("600", "180"), "83.3%"), ("--gpus 16384 --failures-per-day 8.63", "76.1%")
    ]:  # fmt: skip
        main(["goodput", "--simulate", *options.split()])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoints on disk")]
        assert line.split()[3] == useful and useful.removesuffix(".0%").removesuffix("%") in page


def test_inputs_that_cannot_be_are_named_together():
    with pytest.raises(ValueError) as caught:
        FailureInputs(0, -1, step_s=float("inf"))
    assert str(caught.value) == (
        "gpus is 0; it must be above 0; failures_per_day is -1; it must be at least 0;"
        " step_s is inf; it must be above 0."
    )


def test_the_command_prints_inputs_and_prediction(capsys):
    assert main("goodput --simulate --gpus 16384 --mtbf 50000 --spares 160".split()) == 0
    out = capsys.readouterr().out
    assert out == text_of(FailureInputs(16384, 24 * 16384 / 50000, spares=160)) + "\n"
    assert "a failure every 3.05 h: of one GPU every 50,000 h" in out
    assert out.splitlines()[-3].split() == "checkpoints on disk 78.0% 5.7% 15.4% 0.8% 0.0% 0.0%".split()


def test_the_command_gives_all_figures_as_json(capsys):
    assert main("goodput --simulate --gpus 1000 --failures-per-day 0 --spares 0 --checkpoint-s 0 --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["checkpoints on disk", "and copies in memory"]
    assert found["checkpoints on disk"]["useful"] == 1


@pytest.mark.parametrize(("gpus", "spares"), [(512, 8), (8, 0), (1600, 16)])
def test_a_share_of_spares_is_a_host_or_none(gpus, spares, capsys):
    assert main(f"goodput --simulate --gpus {gpus} --mtbf 50000".split()) == 0
    assert f"spares {spares}, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--gpus 8", "--simulate needs --gpus, and one of --mtbf and --failures-per-day."),
        ("--gpus 8 --mtbf 0", "--mtbf 0: expected hours above 0."),
        ("--gpus 8 --mtbf 9 --spares few", "--spares few: expected a number of GPUs, or a share as in 1%."),
        ("--gpus 8 --mtbf 9 --step-s 0", "step_s is 0; it must be above 0."),
        ("logs --gpus 8 --mtbf 9", "--simulate reads no ledgers: leave logs or --simulate out."),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, why, capsys):
    assert main(["goodput", "--simulate", *options.split()]) == 2
    assert capsys.readouterr().err == f"python -m mpmd goodput: {why}\n"
