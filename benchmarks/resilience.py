"""Measures what `mpmd.resilient` costs a step, and how long a job takes from a kill to the next finished step.

    python benchmarks/resilience.py                 # both, in four processes on this machine
    python benchmarks/resilience.py --only cost --mib 32 --task-ms 20
    python benchmarks/resilience.py --only kill                    # another process is started in its place
    python benchmarks/resilience.py --only kill --spares 1         # one waits
    python benchmarks/resilience.py --only kill --start-over
    python benchmarks/resilience.py --only cut --spares 2         # from a cut cable, between network namespaces (root)
    python benchmarks/resilience.py --only ledger --task-ms 2     # the cost of the ledgers of all processes
    python benchmarks/resilience.py --only pace --task-ms 2       # the cost of measuring one step in four
    python benchmarks/resilience.py --only audit                  # the cost of an audit for its step

Cost: accelerators are emulated as in pipeline_efficiency.py: each task calls back to the host and sleeps. The state is
two arrays a stage, donated to the step. The same steps run as a plain loop and under `mpmd.resilient` by turns, in one
job, so that other work on the machine disturbs both. Processor time is for the four processes, without the keeper.
`ledger`, `pace` and `audit` compare the plain loop with and without their feature in the same way.

Kill: the small GPT of examples/train_gpt.py. One process kills itself while a step runs. The others wait for its
replacement, which reports its progress. With `--start-over` it raises an error instead; the slowest of all new
processes counts.

Cut: the same, with two of the processes on a host whose cable is cut. Spares wait or are started on the other host.
"""

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_GROUPS = 4
NUMBER = int(os.environ.get("MPMD_PROCESS_ID", "0"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("cost", "kill", "cut", "ledger", "pace", "audit"), help="measure only this")
    parser.add_argument("--spares", type=int, default=0, help="for `kill` and `cut` (default: 0)")
    parser.add_argument("--start-over", action="store_true", help="for `kill`: an error, after which all start over")
    parser.add_argument("--mib", type=float, default=16, help="of the state in each process (default: %(default)s)")
    parser.add_argument("--task-ms", type=float, default=20.0, help="of a task (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each way (default: %(default)s)")
    args = parser.parse_args()
    if "MPMD_PROCESS_ID" in os.environ:
        kill(args.only == "kill", args.start_over) if args.only in ("kill", "cut") else cost(args)
        return 0
    for what in (args.only,) if args.only else ("cost", "kill"):
        launcher = [ROOT / "scripts" / "launch_multihost.sh", "-n", NUM_GROUPS, "--cpu-devices", 1, "--restarts", 1]
        launcher += ["--spares", args.spares if what in ("kill", "cut") else int(what == "pace")]
        launcher += ["--replace-slow", 1000] if what == "pace" else []
        words = [*launcher, "--", sys.executable, __file__, *sys.argv[1:], "--only", what]
        with tempfile.TemporaryDirectory() as cache:
            more = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            more |= {"MPMD_LEDGER_DIR": cache} if what == "ledger" else {}
            environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"} | more
            if what == "cut":
                print_kill(cut(list(map(str, words)), environment, args.spares))
                continue
            done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n")
            return done.returncode
        print_kill(done.stdout) if what == "kill" else print(re.sub(r"(?m)^\[\d+\] ", "", done.stdout), end="")
    return 0


def cost(args) -> None:
    """Prints the time of a step as a plain loop, and under `mpmd.resilient` or with a ledger."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpmd
    import scheduler
    from mpmd.job import joining

    mpmd.initialize()
    job = joining.current()
    assert job is not None
    mesh = mpmd.MpmdMesh(jax.make_mesh((NUM_GROUPS,), ("stage",)), "stage")
    width = int((args.mib * 2**20 / 4 / 2) ** 0.5)  # two arrays of float32

    def wait(number):
        time.sleep(args.task_ms / 1000)
        return number

    def work(x):
        return x.at[0, 0].set(jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x[0, 0]))

    @jax.custom_vjp
    def stage(w, x):
        return work(x) + w[:1]

    stage.defvjp(lambda w, x: (stage(w, x), w), lambda w, dy: (jnp.zeros_like(w).at[:1].add(dy), work(dy)))

    def loss(ws, x):
        for w in ws[:-1]:
            x = mpmd.mark_stage_end(stage(w, x))
        return (stage(ws[-1], x) ** 2).mean()

    @mpmd.jit(mpmd_mesh=mesh, donate_argnums=0, audit_every=int(args.only == "audit"))
    def step(state, xs):
        schedule = scheduler.OneFOneB(NUM_GROUPS)
        value, grads = mpmd.treduce(lambda x: jax.value_and_grad(loss)(state["w"], x), xs, schedule=schedule)
        m = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
        return {"w": [w - 0.01 * m for w, m in zip(state["w"], m, strict=True)], "m": m}, value

    xs = np.ones((2 * NUM_GROUPS, 1, width), np.float32)
    zeros = [np.zeros((width, width), np.float32)] * NUM_GROUPS
    state, _ = step({"w": zeros, "m": list(zeros)}, xs)
    for _ in range(100 if args.only == "audit" else 0):  # each program is audited for the first time
        state, _ = step(state, xs)
    executor = step.lower(state, xs).compile()._executor
    accounts, other = executor._accounts, args.only if args.only in ("ledger", "pace", "audit") else "resilient"
    times: dict[str, list[float]] = {"plain": [], other: []}
    processor = {"plain": 0.0, other: 0.0}

    def body(i, state):
        begun.append(time.perf_counter())
        state, value = step(state, xs)
        float(value)
        return state

    for turn in range(2 * args.turns):
        way, begun = list(times)[turn % 2], []
        job.exchange("a turn", "", range(NUM_GROUPS))
        before = time.process_time()
        executor._accounts = accounts if way == other != "resilient" else None
        job.activity.has_pace = way == "pace"
        if other == "audit":
            vars(executor)["_sampling"].every = 1 if way == other else sys.maxsize
        if way != "resilient":
            for i in range(args.steps):
                state = body(i, state)
        else:
            state = mpmd.resilient(body, state, args.steps)
        processor[way] += time.process_time() - before
        times[way] += [b - a for a, b in itertools.pairwise(begun)]  # includes the work of `resilient` between steps
    said = job.exchange("the end", json.dumps(processor), range(NUM_GROUPS))
    if jax.process_index():
        return
    medians = {way: statistics.median(found) for way, found in times.items()}
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
    print(f"state: {nbytes / 2**20:.0f} MiB, in {NUM_GROUPS} processes")
    for way in times:
        cpu = sum(json.loads(text)[way] for text in said.values()) / (args.steps * args.turns)
        print(f"{way:9}  step {medians[way] * 1e3:7.1f} ms, processor time {cpu * 1e3:7.1f} ms a step")
    print(f"{other} / plain: {medians[other] / medians['plain']:.4f}")


def cut(words: list[str], environment: dict[str, str], spares: int) -> str:
    """Runs processes on two hosts, cuts the cable after 20 steps, and returns their output with the time of the cut."""
    sys.path.append(str(ROOT / "tests" / "launcher"))
    import hosts as network  # pyright: ignore[reportMissingImports]

    places = "hosta,hostb" + (",localhost:0" if spares else "")  # the launcher runs on hosta, so both places exist
    with tempfile.TemporaryDirectory() as folder, network.two_hosts(Path(folder)) as hosts:
        words[1:1] = ["--ssh", hosts.ssh, "-H", places, "--min-hosts", "1"]
        words[words.index("-n") + 1] = str(NUM_GROUPS // 2)
        words[:0] = hosts.here.prefix
        lines: list[str] = []
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as job:
            assert job.stdout is not None
            for line in job.stdout:
                lines.append(line)
                if sum(text.endswith("1: a step is finished\n") for text in lines) == NUM_GROUPS // 2:
                    job.terminate()
                if line.endswith("0: 20 steps\n"):
                    hosts.cable("down", "b")
                    lines.append(f"at {time.time():.3f} 0: kill\n")
                if "takes the place" in line or "starts over" in line:
                    lines.append(f"at {time.time():.3f} 1: the launcher has found that the host is lost\n")
    if not any(line.endswith("1: a step is finished\n") for line in lines):
        raise SystemExit("".join(lines))
    return "".join(lines)


def kill(itself: bool, starts_over: bool) -> None:
    """Trains the small GPT; in the first attempt process 1 kills itself while a step runs, raises, or is cut off."""
    note("Python has begun")
    sys.path.remove(str(ROOT / "benchmarks"))  # a file there is called reshard
    import jax
    import train_gpt

    import mpmd

    note("JAX is imported")
    initialize, resilient = mpmd.initialize, mpmd.resilient

    def end():
        note("kill")
        if starts_over:
            raise RuntimeError("an error of the program")
        os.kill(os.getpid(), signal.SIGKILL)

    def noted_initialize():
        initialize()
        note("the processes have met")

    def noted_resilient(body, state, num_steps, **more):
        note("compiled, and a first state is made")

        def noted(i, state):
            if not seen:
                note("the state is put back")
            state = body(i, state)
            jax.block_until_ready([x.to_mpmd_local_array for x in jax.tree.leaves(state) if x.is_partially_addressable])
            if not seen:
                note("a step is finished")
            seen.append(i)
            if not itself and len(seen) == 20 and NUMBER == 0:
                note("20 steps")
            if itself and len(seen) == 20 and os.environ["MPMD_ATTEMPT"] == "0" and NUMBER == 1:
                end() if starts_over else threading.Timer(0.05, end).start()
            return state

        seen: list[int] = []
        return resilient(noted, state, num_steps, **more)

    mpmd.initialize, mpmd.resilient = noted_initialize, noted_resilient
    sys.exit(train_gpt.main(["--steps", "40" if itself else "4000"]))


def note(what: str) -> None:
    attempt = 1 if NUMBER >= NUM_GROUPS else os.environ["MPMD_ATTEMPT"]
    print(f"at {time.time():.3f} {attempt}: {what}", flush=True)


def print_kill(text: str) -> None:
    """Prints a table of where the time went, from the notes of the processes."""
    found = [(float(at), attempt, what) for at, attempt, what in re.findall(r"at ([\d.]+) (\d): (.*)", text)]
    (before,) = [at for at, _, what in found if what == "kill"]
    killed = before
    print("from the kill to the next finished step:")
    for what in dict.fromkeys(what for at, attempt, what in found if attempt == "1" and at > killed):
        at = max(at for at, attempt, other in found if (attempt, other) == ("1", what))
        print(f"  {at - before:6.2f} s  {what}")
        before = at
    print(f"  {before - killed:6.2f} s  in all")


if __name__ == "__main__":
    sys.exit(main())
