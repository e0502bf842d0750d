"""A Slurm cluster on this machine: munged, slurmctld and a slurmd per node, in a folder of their own, ended by pid.

It has one node, or the two hosts of `hosts.py`.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hosts import Hosts
from launching import alive, until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "sinfo")


def missing() -> str | None:
    """Why a cluster cannot be had here, or None."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    programs = [p for p in _PROGRAMS if shutil.which(p) is None and not Path(f"/usr/sbin/{p}").exists()]
    if programs:
        return f"not installed: {', '.join(programs)} (Debian: slurmctld slurmd slurm-client munge)"
    return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _name() -> str:
    return socket.gethostname().split(".")[0]


class Cluster:
    """The daemons, and the variables that make Slurm's commands find them."""

    def __init__(self, folder: Path, hosts: Hosts | None = None):
        self.folder = folder
        self.prefix = hosts.here.prefix if hosts else ()  # what makes a command run where slurmctld does
        self._nodes = {h.name: (h.address, h.prefix) for h in hosts.both} if hosts else {_name(): ("127.0.0.1", ())}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "SLURM_OVERCOMMIT": "1"}
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        os.chmod(self.folder, 0o755)
        for name in ("state", "munge", *(f"spool/{node}" for node in self._nodes)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge_socket = self.folder / "munge" / "socket"
        self._spawn(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}",
            f"--pid-file={self.folder}/munge/pid", f"--log-file={self.folder}/munge/log",
            f"--seed-file={self.folder}/munge/seed", "--num-threads=1",
        )  # fmt: skip
        until(munge_socket.exists, "munged", 30)
        first, (address, _) = next(iter(self._nodes.items()))
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs={os.cpu_count()} Gres=gpu:2 State=UNKNOWN"
            for name, (address, _) in self._nodes.items()
        )
        (self.folder / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
SlurmctldPort={_free_port()}
SlurmdPort={_free_port()}
AuthType=auth/munge
AuthInfo=socket={munge_socket}
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
KillWait=30
{nodes}
PartitionName=all Nodes={",".join(self._nodes)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
""")
        for i in range(2):  # GPUs on paper
            (self.folder / f"gpu{i}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        # In the namespaces of hosts there is no cgroup to be found, and none is needed.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._spawn("slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf"), prefix=self.prefix)
        for _, prefix in self._nodes.values():
            self._spawn("slurmd", "-D", "-f", str(self.folder / "slurm.conf"), prefix=prefix)
        until(self._is_idle, f"idle nodes (logs in {self.folder})", 60)

    def _is_idle(self) -> bool:
        states = self.command("sinfo", "--noheader", "--Node", "--format=%t").stdout.split()
        return states == ["idle"] * len(self._nodes)

    def _spawn(self, name: str, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        path = shutil.which(name) or f"/usr/sbin/{name}"
        log = (self.folder / f"{name}.out").open("a")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | self.environment
        self._daemons.append(
            subprocess.Popen(
                [*prefix, path, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )
        )  # fmt: skip

    def command(self, *words: str) -> subprocess.CompletedProcess:
        """Runs one of Slurm's commands."""
        return subprocess.run(
            [*self.prefix, *words], env=os.environ | self.environment, capture_output=True, text=True, timeout=60
        )

    def jobs(self) -> list[str]:
        """The jobs that are in the queue."""
        return self.command("squeue", "--noheader", "--format=%i").stdout.split()

    def bring_back(self, node: str) -> None:
        """Makes a node idle that was cut off or down.

        Left alone, Slurm goes on ending what ran there for up to two minutes, and new jobs wait for the node so long.
        """
        for state in ("down", "resume"):
            self.command("scontrol", "update", f"nodename={node}", "reason=test", f"state={state}")
        until(self._is_idle, f"idle nodes (logs in {self.folder})")

    def stop(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            for job in self.jobs():
                self.command("scancel", job)
            with contextlib.suppress(AssertionError):
                until(lambda: not self.jobs(), "an empty queue", 20)
        for daemon in reversed(self._daemons):
            for name in (signal.SIGTERM, signal.SIGKILL):
                if daemon.poll() is None:
                    daemon.send_signal(name)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        daemon.wait(10)
            assert not alive(daemon.pid)


@contextlib.contextmanager
def cluster(folder: Path, hosts: Hosts | None = None) -> Iterator[Cluster]:
    """A cluster that is gone at the end."""
    one = Cluster(folder, hosts)
    try:
        one.start()
        yield one
    finally:
        one.stop()
