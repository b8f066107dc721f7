"""Whole runs over NCCL on shares of the one GPU that there is: every way in which replicas exchange, workers that stop or fail, thousands
of steps with persistent kernels beside messages that wait, two hosts, and process groups of the user's own."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import _disturbed_run as disturbed_run
import carrywave
from _disturbed_run import RunSetup
from benchmarks.shares.mps import PERCENT, shares
from carrywave.parallel import worker_pool

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "hosts"))
from _namespaces import ADDRESSES, Cluster, wired

import _whole_snapshots

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CLOSE = 1e-9  # sums in another order, in float64, over two dozen steps
WORDS = ("data.train=text.txt", "data.tokens=char", "model.hidden=12", "model.layers=2", "batch.lanes=4", "batch.steps=8")
TRAIN = ("train.precision=fp64", "train.optimizer=adam", "train.max_steps=24", "train.clip=0.5")
MODES: dict[str, tuple[str, ...]] = {
    "replicas": ("plan.replicas=2",),
    "stages": ("plan.stages=2", "plan.chunk_steps=2"),
    "local": ("plan.replicas=2", "train.sync=local", "train.sync_every=4"),
    "diloco": ("plan.replicas=2", "train.sync=diloco", "train.sync_every=4"),
}


@pytest.fixture(autouse=True)
def _on_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would ask for it."""
    monkeypatch.setenv("CARRYWAVE_TRANSPORT", "nccl")
    paths = [str(Path(carrywave.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def train(folder: Path, run: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "carrywave", "train", *WORDS, *TRAIN, *words, "--devices", "2", "--run", run]
    with shares(2) as shared:
        kept = os.environ | shared | environment
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=kept, timeout=200, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_over_nccl_is_the_run_on_cpus(mode: str, tmp_path: Path) -> None:
    write_text(tmp_path)
    over_nccl = train(tmp_path, "nccl", *MODES[mode], "--device", "cuda")
    assert over_nccl.returncode == 0, over_nccl.stderr
    assert "over NCCL" in over_nccl.stdout
    is_the_run_on_cpus(tmp_path, mode)


@pytest.mark.parametrize("network", ["a wire", "loopback"])
@pytest.mark.parametrize("mode", ["replicas", "stages"])
def test_two_hosts(mode: str, network: str, tmp_path: Path) -> None:
    """A torchrun on each, under an MPS daemon that they did not start. NCCL's sockets go over the wire between two network namespaces, or,
    where none can be made, over loopback between two host names.
    """
    write_text(tmp_path)
    with two_hosts(network, tmp_path) as start, shares(2) as environment:
        hosts = [start(node, environment | {"PYTHONPATH": os.environ["PYTHONPATH"]}, mode) for node in range(2)]
        try:
            codes = [host.wait(120) for host in hosts]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for host in hosts:
                host.kill()
                host.wait()
    said = [path.read_text() for path in sorted(tmp_path.glob("node*"))]
    assert codes == [0, 0], said
    assert any("over NCCL" in each for each in said), said
    is_the_run_on_cpus(tmp_path, mode)


@contextmanager
def two_hosts(network: str, folder: Path) -> Iterator[Any]:
    """A function that starts a training on one of two hosts, of which each has a share."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def words(node: int, address: str, mode: str) -> list[str]:
        where = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", f"--master-addr={address}", f"--master-port={port}"]
        train = ["carrywave", "train", *WORDS, *TRAIN, *MODES[mode], "--device", "cuda", "--run", "nccl"]
        return ["-m", "torch.distributed.run", *where, "-m", "--", *train]

    def on_loopback(node: int, variables: dict[str, str], mode: str) -> subprocess.Popen[bytes]:
        with (folder / f"node{node}").open("wb") as log:
            named = ["unshare", "-u", "sh", "-c", f'hostname node{node} && exec "$@"', "sh"]
            command = [*named, sys.executable, *words(node, "127.0.0.1", mode)]
            known = os.environ | variables | {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
            return subprocess.Popen(command, cwd=folder, env=known, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    if network == "loopback":
        if shutil.which("unshare") is None or subprocess.run(["unshare", "-u", "true"], capture_output=True).returncode:
            pytest.skip("needs unshare and root, for a host name of its own")
        yield on_loopback
        return
    with wired() as namespaces:
        cluster = Cluster(namespaces, folder)
        yield lambda node, variables, mode: cluster.start(node, words(node, ADDRESSES[0], mode), **variables).process


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 40)


def is_the_run_on_cpus(folder: Path, mode: str) -> None:
    """Train the same on CPUs, and compare."""
    on_cpus = train(folder, "cpus", *MODES[mode], "--device", "cpu", CARRYWAVE_SHARE_GPU="0", CARRYWAVE_TRANSPORT="auto")
    assert on_cpus.returncode == 0, on_cpus.stderr
    found, wanted = (_whole_snapshots.load(folder / run / "snapshots").parameters for run in ("nccl", "cpus"))
    for name, tensor in wanted.items():
        error = float((found[name] - tensor).abs().max() / tensor.abs().max())
        assert error < CLOSE, f"{name}: {error:.1e}"


@pytest.mark.usefixtures("two_shares")
@pytest.mark.parametrize("plan", ["plan.replicas=2", "plan.stages=2"])
def test_a_worker_that_is_stopped_in_a_recorded_step_is_noticed_and_replaced(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYWAVE_HEARTBEAT_SECONDS", "3")
    disturbed_run.write_data(tmp_path)
    rows = [json.loads(line)["tokens"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    numbered = [{"steps": [[math.sin(n), math.cos(0.1 * n)] for n in row], "labels": [str(n % 5) for n in row]} for row in rows]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))
    words = ("task=tagging", "data.train=numbers.jsonl", "data.valid=numbers.jsonl", "model.hidden=64", "train.precision=bf16", plan)
    setup = RunSetup("stopped", 2, words, steps=60, shares=2)
    told = disturbed_run.disturbed(tmp_path, setup, 1, seed=2, number=signal.SIGSTOP, moments=("step",))
    assert told.code == 0, told.lines
    assert told.restarts == 1
    assert any("gave no sign of life for" in line for line in told.lines), told.lines
    [fault] = told.faults
    assert fault.noticed_seconds is not None
    print(f"noticed after {fault.noticed_seconds:.1f} s")


FAILS = """
import os, sys
import torch
import carrywave as cw
from carrywave.model.heads.forecast import Forecast

class Encoder(torch.nn.Module):
    width = 4
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 4)
    def forward(self, x):
        if os.environ.get("RANK") == "1" and os.path.exists(sys.argv[1] + ".now"):
            raise ValueError("the encoder of rank 1 fails")
        return self.linear(x)

data = [[float(n % 7 + k) for n in range(30)] for k in range(16)]
cw.fit(cw.Model(Encoder(), cw.LSTM(4, 8, num_layers=2), Forecast(8, 1, 1)), data, spec={"task": "forecasting", "data": {"horizon": 1},
       "batch": {"lanes": 4, "steps": 8}}, train={"epochs": 100000}, plan={"replicas": 2}, devices=2, device="cuda", run=sys.argv[1])
"""


@pytest.mark.usefixtures("two_shares")
def test_a_worker_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    now = threading.Timer(20, (tmp_path / "run.now").touch)  # when it trains
    now.start()
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    now.cancel()
    assert done.returncode not in (0, 124), done.stderr
    assert "the encoder of rank 1 fails" in done.stderr


UNKIND = [
    pytest.param(2, 512, 25, id="two stages on 32 multiprocessors"),
    pytest.param(4, 512, 25, id="four stages on 32 multiprocessors"),
    pytest.param(2, 1024, 50, id="two stages on 66 multiprocessors"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "hidden", "percent"), UNKIND)
def test_ten_thousand_steps_with_our_kernels_beside_messages_that_wait(stages: int, hidden: int, percent: int) -> None:
    case = {"layers": 4, "hidden": hidden, "lanes": 16, "steps": 16}
    split = {"family": "wavefront", "stages": stages, "chunks": 4, "transport": "nccl"}
    job = {"case": case, "split": split, "steps": 10_000, "device": "cuda"}
    with shares(stages, percent) as environment:
        environment = environment | {"CARRYWAVE_TRANSPORT": "nccl", PERCENT: str(percent)}
        told = [rows[0] for rows in worker_pool.start("_unkind", job, stages, environment=environment, name="the unkind workers")]
    print(told[0])
    assert {each["kernel"] for each in told} == {"persistent"}
    assert all(each["replays"] > 9_990 for each in told)
    assert all(each["losses"] == told[0]["losses"] for each in told)
    assert torch.isfinite(torch.tensor(told[0]["losses"])).all()


OWN_GROUP = """
import os, sys, time
import torch, torch.distributed as dist
rank = int(sys.argv[1])
os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
import carrywave as cw
from carrywave.model.encoders import Numbers
from carrywave.model.heads.forecast import Forecast
torch.manual_seed(0)
model = cw.Model(Numbers(3), cw.LSTM(3, 64, num_layers=2), Forecast(64, 1, 1))
trainer = cw.Trainer(model, {"lr": 0.01}, plan={sys.argv[3]: 2}, device="cuda")
x, y = torch.randn(8, 4, 3), torch.randn(8, 4, 1, 1)
for _ in range(5):
    loss = trainer.step(cw.Batch.of(x, y))
print("loss", float(loss), "recorded", trainer.capture and trainer.capture.replays["step"], flush=True)
dist.destroy_process_group()
print("destroyed", flush=True)
"""


@pytest.mark.parametrize("split", ["replicas", "stages"])
def test_a_process_group_of_the_users_own_can_be_destroyed(split: str, tmp_path: Path) -> None:
    with shares(2) as environment:
        command = [sys.executable, "-c", OWN_GROUP]
        crew: list[Any] = []
        for rank in range(2):
            words = [str(rank), str(tmp_path / "store"), split]
            with (tmp_path / f"{rank}.log").open("w") as log:
                crew.append(subprocess.Popen([*command, *words], stdout=log, stderr=log, env=os.environ | environment))
        try:
            codes = [each.wait(90) for each in crew]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for each in crew:
                each.kill()
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    assert codes == [0, 0], logs
    assert all(("recorded None" if split == "stages" else "recorded 0") in log and "destroyed" in log for log in logs), logs
    assert logs[0].splitlines()[-2] == logs[1].splitlines()[-2]
