"""A run and its data on a real server that speaks S3 (moto), through s3fs: killed, resumed on another host, evaluated there.

Both packages are installed into a virtual environment of the test's own, unless they are here already.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import _disturbed_run as disturbed_run
import carrywave

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUN = "s3://bucket/runs/words"
# The server does not verify signatures, but private objects are not for somebody without any.
SIGNED = {"Authorization": "AWS key:signature"}


@dataclass
class Server:
    """The server, and how programs reach it."""

    folder: Path
    paths: tuple[str, ...]  # of installed packages
    address: str

    def environment(self, host: int) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(carrywave.__file__).parents[1]), *self.paths]),
            "OMP_NUM_THREADS": "1",
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "CARRYWAVE_CACHE": str(self.folder / f"cache-{host}"),
        }

    def start(self, host: int, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "carrywave", *words, "--device", "cpu"]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment(host), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def carrywave(self, host: int, *words: str) -> tuple[int, str]:
        process = self.start(host, *words)
        out, _ = process.communicate(timeout=900)
        return process.returncode, out

    def put(self, name: str, data: bytes) -> None:
        headers = SIGNED | {"Content-Type": "application/octet-stream"}
        urllib.request.urlopen(urllib.request.Request(f"{self.address}/bucket/{name}", data=data, headers=headers, method="PUT")).close()

    def get(self, name: str) -> bytes | None:
        try:
            asked = urllib.request.Request(f"{self.address}/bucket/{name}", headers=SIGNED)
            with urllib.request.urlopen(asked) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    def copy(self, run: str, to: Path) -> Path:
        """What a run has in the store, as files: the last snapshot, the metrics and the weights."""
        last = (self.get(f"{run}/snapshots/last") or b"").decode().strip()
        with urllib.request.urlopen(f"{self.address}/bucket?prefix={run}/snapshots/{last}/") as answer:
            listed = answer.read().decode()
        names = [piece.partition("</Key>")[0].removeprefix(f"{run}/") for piece in listed.split("<Key>")[1:]]
        for name in ("metrics.jsonl", "weights.safetensors", "snapshots/last", *names):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes(self.get(f"{run}/{name}") or b"")
        return to


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("s3")
    python, paths = _installed(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    program = "import sys; from moto.server import main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [python, "-c", program, "-H", "127.0.0.1", "-p", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    made = Server(folder, paths, f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                made.put("", b"")
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    pytest.skip("the server does not start here")
                time.sleep(0.2)
        yield made
    finally:
        process.kill()
        process.wait()


def _installed(folder: Path) -> tuple[str, tuple[str, ...]]:
    """An interpreter that has moto, and the paths on which s3fs is found."""
    if importlib.util.find_spec("moto") and importlib.util.find_spec("s3fs"):
        return sys.executable, tuple(filter(None, sys.path))
    place = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = str(place / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "moto[server]", "s3fs"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"moto and s3fs cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    found = subprocess.run([python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True)
    return python, (found.stdout.strip(),)


def words(run: str, *more: str) -> list[str]:
    data = ["data.train=s3://bucket/rows.jsonl", "data.valid=s3://bucket/rows.jsonl"]
    return ["train", *disturbed_run.SPEC, *data, "train.max_steps=40", "train.epochs=1000000", "--run", run, *more]


def test_a_run_on_a_server_survives_a_kill_and_goes_on_elsewhere(server: Server, tmp_path: Path) -> None:
    disturbed_run.write_data(tmp_path)
    server.put("rows.jsonl", (tmp_path / "rows.jsonl").read_bytes())
    process = server.start(0, *words(RUN))
    while server.get("runs/words/snapshots/last") is None and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, out

    code, out = server.carrywave(1, *words(RUN))
    assert (code, out.splitlines()[-1]) == (
        2,
        f"carrywave: {RUN} already exists and is not empty; use --resume to continue it, or use another --run",
    )
    code, out = server.carrywave(1, "train", "--run", RUN, "--resume")
    assert code == 0, out
    assert "resuming from step " in out
    code, out = server.carrywave(2, *words("s3://bucket/runs/calm"))
    assert code == 0, out
    ours, theirs = (disturbed_run.contents(server.copy(f"runs/{run}", tmp_path / run)) for run in ("words", "calm"))
    assert ours.keys() == theirs.keys()
    assert len(ours) > 4
    assert [name for name in ours if ours[name] != theirs[name]] == []

    code, out = server.carrywave(3, "evaluate", RUN)
    assert code == 0, out
    assert "loss" in out

    server.put("rows.jsonl", (tmp_path / "rows.jsonl").read_bytes().replace(b"[0, 1,", b"[1, 0,"))
    code, out = server.carrywave(1, "train", "--run", RUN, "--resume", "train.max_steps=50")
    assert code == 2
    assert "the data has changed since the snapshot was written (s3://bucket/rows.jsonl" in out


def test_a_server_that_is_not_there_is_told_in_one_line(server: Server) -> None:
    gone = Server(server.folder, server.paths, "http://127.0.0.1:9")
    environment = {"AWS_MAX_ATTEMPTS": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "carrywave", *words(RUN), "--device", "cpu"],
        env=gone.environment(9) | environment,
        cwd=server.folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith(f"carrywave: {RUN}: cannot be listed (")
    assert line.endswith("check the address, the credentials and the connection")
