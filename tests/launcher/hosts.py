"""Two hosts on one machine: network namespaces joined by a cable, each with a name, a hosts file and an sshd."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from launching import command, until

PORT = 2222


def missing(*, with_ssh: bool = True) -> str | None:
    """Why two hosts cannot be had here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    needed = ("ip", "unshare", *(("/usr/sbin/sshd", "ssh", "ssh-keygen") if with_ssh else ()))
    programs = [p for p in needed if shutil.which(p) is None]
    if programs:
        return f"not installed: {', '.join(programs)} (Debian: iproute2 openssh-server openssh-client util-linux)"
    probe = subprocess.run(["ip", "netns", "add", name := f"mpmd-probe-{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Host:
    """One of the two hosts."""

    def __init__(self, name: str, namespace: str, address: str):
        self.name, self.namespace, self.address = name, namespace, address
        self.sshd: subprocess.Popen | None = None

    @property
    def prefix(self) -> tuple[str, ...]:
        """What makes a command run there."""
        enter = f'hostname {self.name} && exec "$@"'
        return ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", enter, "sh")

    def pids(self) -> set[int]:
        """Its processes, the sshd that listens apart."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        pids = {int(pid) for pid in listed.stdout.split()}
        return pids - ({self.sshd.pid} if self.sshd else set())

    def wait_until_empty(self, limit_s: float = 60.0) -> None:
        with contextlib.suppress(AssertionError):
            until(lambda: not self.pids(), "", limit_s)
        assert not self.pids(), f"left on {self.name}: {[command(pid) for pid in self.pids()]}"


class Hosts:
    """`here`, where the launcher runs, and `there`; both with sshd, unless nobody needs it."""

    def __init__(self, folder: Path, with_ssh: bool = True):
        self._with_ssh = with_ssh
        number = os.getpid() % 250
        names = [f"mpmd-{os.getpid()}-{side}" for side in "ab"]
        self.here = Host("hosta", names[0], f"10.{200 + number % 50}.{number}.1")
        self.there = Host("hostb", names[1], f"10.{200 + number % 50}.{number}.2")
        self.both = (self.here, self.there)
        self.folder = folder
        self.ssh = (
            f"ssh -F none -p {PORT} -i {folder}/key -o IdentitiesOnly=yes -o StrictHostKeyChecking=no"
            " -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        )
        self._link = f"mp{os.getpid()}"

    def _do(self, *words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    def start(self) -> None:
        for host in self.both:
            self._do("ip", "netns", "add", host.namespace)
            files = Path("/etc/netns") / host.namespace
            files.mkdir(parents=True)
            (files / "hosts").write_text(
                "127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in self.both)
            )
            self._do("ip", "-n", host.namespace, "link", "set", "lo", "up")
        ends = [f"{self._link}{side}" for side in "ab"]
        here, there = (h.namespace for h in self.both)
        self._do(*f"ip link add {ends[0]} netns {here} type veth peer name {ends[1]} netns {there}".split())
        for host, end in zip(self.both, ends, strict=True):
            self._do("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", end)
            self._do("ip", "-n", host.namespace, "link", "set", end, "up")
        if self._with_ssh:
            self._start_sshds()

    def _start_sshds(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("key", "host_key"):
            self._do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.folder}/{name}")
        shutil.copy(self.folder / "key.pub", self.folder / "authorized")
        settings = (
            f"Port {PORT}\nHostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/authorized\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\n"
        )
        (self.folder / "sshd_config").write_text(settings)
        for host in self.both:
            command = [*host.prefix, "/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")]
            log = (self.folder / f"sshd-{host.name}.log").open("w")
            host.sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for host in self.both:
            log = self.folder / f"sshd-{host.name}.log"
            until(lambda log=log: "Server listening" in log.read_text(), f"sshd on {host.name}", 30)

    def cable(self, state: str, end: str = "a") -> None:
        """Plugs the cable in (`up`) or out (`down`). At `hosta` (`a`), that host knows; at `b`, packets get lost."""
        host = self.here if end == "a" else self.there
        self._do("ip", "-n", host.namespace, "link", "set", f"{self._link}{end}", state)

    def stop(self) -> None:
        for host in self.both:
            if host.sshd is not None:
                host.sshd.kill()
                host.sshd.wait()
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in host.pids():
                    with contextlib.suppress(OSError):
                        os.kill(pid, 9)
            end = time.monotonic() + 10
            while subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True).returncode:
                if time.monotonic() > end:
                    break
                time.sleep(0.2)
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)


@contextlib.contextmanager
def two_hosts(folder: Path, *, with_ssh: bool = True) -> Iterator[Hosts]:
    """Two hosts, gone at the end."""
    hosts = Hosts(folder, with_ssh)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
