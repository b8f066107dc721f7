"""A `Crew` is worker processes that are started once and run case after case. A worker that fails or hangs ends them all, with its reason;
the next case starts a new crew."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from _cases import Case, Run, plan_of
from safetensors.torch import load_file

WORKER = Path(__file__).parent / "_worker.py"
MOST_SECONDS = 150  # without an answer; the workers' own limit is a minute


class Crew:
    """So many processes at most. A case takes as many of them as its plan needs."""

    def __init__(self, size: int = 4, *, device: str = "cpu", backend: str = "gloo") -> None:
        self.size, self.device, self.backend = size, device, backend
        self.workers: list[subprocess.Popen[str]] = []
        self.replies: queue.SimpleQueue[tuple[subprocess.Popen[str], int, str]] = queue.SimpleQueue()
        self.world, self.worlds = 0, 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: Case) -> Run:
        """What rank 0 got; replicas that did not end with the same bits are a failure of their own."""
        size = plan_of(case).workers
        assert 1 < size <= self.size
        if not self.workers:
            self._start()
        if self.world != size:
            self.world, self.worlds = size, self.worlds + 1
        line = json.dumps({"meeting": str(self.folder / f"meeting-{self.worlds}"), "case": case}) + "\n"
        for worker in self.workers[:size]:
            assert worker.stdin is not None
            worker.stdin.write(line)
            worker.stdin.flush()
        replies = self._replies(size)
        _same_bits([reply["digests"] for reply in replies])
        scales = {reply["scale"] for reply in replies}
        assert len(scales) == 1, f"workers scale the loss differently: {scales}"
        for kind in ("losses", "norms", "finite"):
            assert all(reply[kind] == replies[0][kind] for reply in replies), f"workers do not agree on the {kind}"
        tensors = load_file(replies[0].pop("tensors"))
        parts = {
            kind: {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(kind)}
            for kind in ("gradient", "weight")
        }
        return Run(**replies[0], gradients=parts["gradient"], weights=parts["weight"])

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="carrywave-crew-")
        self.folder = Path(self._folder.name)
        self.world = 0
        # One thread each: the sums keep their order. cuBLAS repeats its bits only with a workspace of a fixed size.
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        environment = os.environ | own | {"CUBLAS_WORKSPACE_CONFIG": ":4096:2"}
        for rank in range(self.size):
            command = [sys.executable, str(WORKER), str(rank), str(self.folder), self.device, self.backend]
            with (self.folder / f"{rank}.log").open("w") as log:
                worker = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
                )
            self.workers.append(worker)
            threading.Thread(target=self._listen, args=(worker, rank), daemon=True).start()

    def _listen(self, worker: subprocess.Popen[str], rank: int) -> None:
        assert worker.stdout is not None
        for text in worker.stdout:
            self.replies.put((worker, rank, text))
        self.replies.put((worker, rank, json.dumps({"error": f"worker {rank} ended"})))

    def _replies(self, size: int) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        while len(found) < size:
            try:
                worker, rank, text = self.replies.get(timeout=MOST_SECONDS)
            except queue.Empty:
                missing = sorted(set(range(size)) - set(found))
                self._fail(f"no answer from workers {missing} within {MOST_SECONDS} s")
            if worker not in self.workers:
                continue  # of an earlier crew
            found[rank] = json.loads(text)
            if "error" in found[rank]:
                log = (self.folder / f"{rank}.log").read_text()[-2000:]
                self._fail(f"worker {rank}: {found[rank]['error']}\n{log}")
        return [found[rank] for rank in range(size)]

    def _fail(self, reason: str) -> None:
        self.close()
        raise AssertionError(reason)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                pipe.close()
        if self.workers:
            self._folder.cleanup()
        self.workers = []


def _same_bits(held: list[dict[str, str]]) -> None:
    """A weight is the same on all workers that hold it: replicas, and stages that share a tied one."""
    seen: dict[str, str] = {}
    for rank, digests in enumerate(held):
        for name, digest in digests.items():
            assert seen.setdefault(name, digest) == digest, f"{name} of rank {rank} differs in its bits from the same weight elsewhere"
