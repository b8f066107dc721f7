"""A real Slurm on this machine: munged, slurmctld and two slurmd of two cores each, all in one folder, all stopped at the end."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PACKAGES = ("slurm-wlm", "munge")
TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue")
START_SECONDS = 60
NODES = ("n1", "n2")


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _install() -> None:
    """Install Slurm where that is possible; skip the test otherwise."""
    if all(_tool(name) for name in TOOLS):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("needs Slurm (slurm-wlm, munge), or root and apt-get to install it")
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
    made = subprocess.run(command, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, text=True)
    if made.returncode or not all(_tool(name) for name in TOOLS):
        pytest.skip(f"Slurm cannot be installed here: {made.stderr.strip()[-200:]}")


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


class Slurm:
    """A running Slurm, and commands in it. Its nodes n1 and n2 are this machine; their names are not in the network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        folder = self.folder
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o755)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munge = {"key-file": key, "socket": self.socket, "pid-file": "munge/pid", "log-file": "munge/log", "seed-file": "munge/seed"}
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={folder / str(path)}" for name, path in munge.items()))
        control, *each = _free_ports(1 + len(NODES))
        host = socket.gethostname()
        lines = [
            "ClusterName=carrywave",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={control}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.socket}",
            "CredType=cred/munge",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmctldParameters=config_overrides",
            "ReturnToService=2",
            "KillWait=10",
            "JobRequeue=1",
            "MessageTimeout=60",
            f"StateSaveLocation={folder}/state",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmctldLogFile={folder}/slurmctld.log",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmdLogFile={folder}/slurmd-%n.log",
        ]
        for name, port in zip(NODES, each, strict=True):
            lines.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN")
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        self._daemon("slurmctld", "-D")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        deadline = time.monotonic() + START_SECONDS
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() != str(len(NODES)):
            if time.monotonic() > deadline or any(each.poll() is not None for each in self._daemons):
                logs = [path.read_text()[-500:] for path in sorted(folder.glob("*.log"))]
                pytest.skip(f"Slurm does not start here: {' '.join(logs)[-1500:]}")
            time.sleep(0.2)

    @property
    def socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands, and what they start."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST"))}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}:/usr/sbin"}

    def _daemon(self, name: str, *words: str) -> None:
        tool = _tool(name)
        assert tool is not None
        with (self.folder / f"{name}{len(self._daemons)}.out").open("wb") as log:
            self._daemons.append(subprocess.Popen([tool, *words], env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def run(self, *command: str, cwd: Path | None = None, seconds: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment | variables,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED and so on."""
        shown = self.run("scontrol", "show", "job", job).stdout
        return shown.partition("JobState=")[2].partition(" ")[0]

    def has_steps(self, job: str) -> bool:
        """True while slurmd watches a script or a step of this job: each has a slurmstepd, which says whose it is."""
        found = False
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    found = found or f"slurmstepd: [{job}.".encode() in (entry / "cmdline").read_bytes()
                except OSError:
                    continue  # it has ended
        return found

    def stop(self) -> None:
        self.run("scancel", "--user=root", seconds=30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("a Slurm of its own needs Linux and root")
    _install()
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
