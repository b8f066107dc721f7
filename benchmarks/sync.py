"""Claim: over slow links, replicas that seldom exchange train many times as fast as with an exchange at every step, and almost as well.

Real workers, one thread each, train the same language model on the same text, with the same number of steps and lanes: `train.sync` step,
local, diloco (fp32 and bf16 on the wire) and async. `tokens_per_second` is over all workers, without evaluations and without the first row;
`loss` is that of the validation part in the end, in nats a token, and `loss_to_step` its ratio to that of step. With `--link N` the workers
stand in network namespaces, joined by links of N Mbit/s (needs root), for as many steps as it takes to time them; `sent_MB` is what worker
0 sent in a step, and their loss is not looked at, because links do not change it.

`--curve`: instead, the loss of local and diloco against `train.sync_every`, from 1 to 500. `--text FILE` and `--valid FILE` say what to
train on (by default text that ships with Python), `--set KEY=VALUE` changes the spec, as in `--set model.hidden=256`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.harness import slow_links
from benchmarks.harness.command import main
from benchmarks.harness.workers import printed
from carrywave.errors import RunError

REPLICAS = 4
SPEC = (
    "task=language data.train=builtin:python-topics data.tokens=char model.hidden=256 model.layers=2 batch.lanes=16 batch.steps=32 "
    "batch.eval_lanes=64 train.optimizer=adam train.lr=2e-3 train.clip=1.0 train.schedule=cosine train.epochs=1000 train.max_steps=1000 "
    f"train.precision=fp32 train.snapshot_every=0 plan.replicas={REPLICAS}"
).split()
QUICK = ("model.hidden=16", "model.layers=1", "batch.lanes=8", "batch.steps=8", "train.max_steps=20")
MODES = {"step": (), "local": (), "diloco": (), "diloco, bf16": ("train.sync_dtype=bf16",), "async": ()}
EVERY, QUICK_EVERY = 50, 5
CURVE, QUICK_CURVE = (1, 2, 5, 10, 20, 50, 100, 200, 500), (1, 5)
TIMED_STEPS = 12  # of step and async on a slow link, where every step takes long; the others take three rounds

Row = dict[str, Any]


def run(
    *, quick: bool = False, text: Path | None = None, valid: Path | None = None, link: int | None = None, curve: bool = False,
    set: Sequence[str] = (),
) -> list[Row]:  # fmt: skip
    """One row for each way of exchanging, or for each point of the curve."""
    files = [f"data.{name}={path.absolute()}" for name, path in (("train", text), ("valid", valid)) if path is not None]
    base, every = [*SPEC, *(QUICK if quick else ()), *files, *set], QUICK_EVERY if quick else EVERY
    points = [(name, every) for name in MODES]
    if curve:
        points = [("step", 1), *((name, each) for name in ("local", "diloco") for each in (QUICK_CURVE if quick else CURVE))]
    rows: list[Row] = []
    for rate in (None, link) if link is not None else (None,):
        first: Row = {}
        for name, often in points:
            row = {"sync": name, "sync_every": None if name == "step" else often, "replicas": REPLICAS, "link_Mbit": rate}
            row |= _trained([*base, *_keys(name, often, timed=rate is not None)], rate)
            first = first or row
            row["to_step"] = round(row["tokens_per_second"] / first["tokens_per_second"], 2)
            row["loss_to_step"] = round(row["loss"] / first["loss"], 4) if rate is None else None
            rows += printed([row])
    return rows


def _keys(name: str, every: int, *, timed: bool) -> list[str]:
    """The keys of a way of exchanging; if it is only timed, for so many steps as that takes, in rows of equal length."""
    keys = [f"train.sync={name.partition(',')[0]}", *MODES[name]]
    each = name in ("step", "async")
    if name != "step":
        keys.append(f"train.sync_every={TIMED_STEPS // 4 if timed and each else every}")
    if timed:
        steps, row = (TIMED_STEPS, TIMED_STEPS // 4) if each else (3 * every, every)
        keys += [f"train.max_steps={steps}", f"train.log_every={row}"]
    return keys


def _trained(words: Sequence[str], link: int | None) -> Row:
    """Train with workers of our own start, each on its host, and read what the run says."""
    hosts: AbstractContextManager[list[list[str]]] = nullcontext([[]] * REPLICAS) if link is None else slow_links.hosts(REPLICAS, link)
    with hosts as prefixes, tempfile.TemporaryDirectory(prefix="carrywave-sync-") as name:
        folder = Path(name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1" if link is None else slow_links.address(0), "MASTER_PORT": str(port)}
        where |= {} if link is None else {"GLOO_SOCKET_IFNAME": slow_links.INTERFACE}
        where |= {"WORLD_SIZE": str(REPLICAS), "LOCAL_WORLD_SIZE": "1" if link else str(REPLICAS), "OMP_NUM_THREADS": "1"}
        where["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        crew = []
        for rank, prefix in enumerate(prefixes):
            own = where | {"RANK": str(rank), "LOCAL_RANK": "0" if link else str(rank)}
            command = [*prefix, sys.executable, "-m", "carrywave", "train", *words, "--device", "cpu", "--run", str(folder / "run")]
            with (folder / f"{rank}.log").open("wb") as log:
                crew.append(subprocess.Popen(command, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        codes = [process.wait() for process in crew]
        if any(codes):
            said = (folder / f"{codes.index(max(codes, key=abs))}.log").read_text(errors="replace").strip()
            raise RunError(f"a worker ended with code {max(codes, key=abs)}: {said.rpartition(chr(10))[2]}")
        sent = None if link is None else _sent_bytes(prefixes[0])
        return _result(folder / "run", sent)


def _sent_bytes(prefix: Sequence[str]) -> int:
    counter = f"/sys/class/net/{slow_links.INTERFACE}/statistics/tx_bytes"
    return int(subprocess.run([*prefix, "cat", counter], capture_output=True, text=True, check=True).stdout)


def _result(folder: Path, sent: int | None) -> Row:
    timing, metrics = ([json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in ("timing", "metrics"))
    timed = [row for row in timing if row["split"] == "train" and "tokens_per_second" in row]
    timed = timed[1:] or timed  # the first has the start of everything in it
    steps = max(row["step"] for row in metrics)
    stale = [row for row in timing if "staleness" in row]
    return {
        "steps": steps,
        "tokens_per_second": round(sum(row["tokens_per_second"] * row["seconds"] for row in timed) / sum(row["seconds"] for row in timed)),
        "sent_MB": None if sent is None else round(sent / 1e6 / steps, 3),
        "loss": round([row for row in metrics if row["split"] == "valid"][-1]["loss"], 4),
        "note": f"staleness {stale[-1]['staleness']:.1f} on average, {stale[-1]['most_stale']} at most" if stale else "",
    }


if __name__ == "__main__":
    main("benchmarks.sync")
