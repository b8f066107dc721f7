"""Claim: training from a text file of 2 GB takes at most 300 MB more memory than training from one of 20 MB.

Memory means anonymous memory (RssAnon in /proc/PID/status). Memory-mapped file pages are excluded, because the system reclaims them
whenever it needs room. The peer is the same program on the small file.

Method: one `carrywave train` process per file, starting from an empty cache, so that reading and tokenising count as well as training.
The parent samples the child every 20 ms and keeps the peak. The model is small and the steps are few, since neither depends on the file.
The text is generated, and everything written is removed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from carrywave.benchmarks.harness.workers import memory_bytes
from carrywave.errors import RunError, UserError

MB = 10**6
BOUND_MB = 300
SMALL_MB, LARGE_MB, QUICK_MB = 20, 2_000, 200
SAMPLE_SECONDS = 0.02
SETTINGS = (
    "task=language",
    "data.tokens=char",
    "model.hidden=64",
    "model.layers=1",
    "batch.lanes=16",
    "batch.steps=32",
    "train.max_steps=100",
)


def run(*, quick: bool) -> list[dict[str, object]]:
    """One row per file; `more_mb` is the increase over the small file's peak."""
    if not Path("/proc/self/status").exists():
        raise UserError("bench memory reads /proc, which this system does not have; run it on Linux")
    sizes_mb = (SMALL_MB, QUICK_MB if quick else LARGE_MB)
    with tempfile.TemporaryDirectory(prefix="carrywave-memory-") as name:
        folder = Path(name)
        # The file and its tokens, and as much again while the cache is being written.
        needed_mb, free_mb = 4 * max(sizes_mb), shutil.disk_usage(folder).free // MB
        if free_mb < needed_mb:
            raise UserError(f"bench memory needs {needed_mb} MB of disk, but {folder.parent} has {free_mb} MB; set TMPDIR to a larger disk")
        valid = folder / "valid.txt"
        _write_text(valid, MB // 10)
        rows: list[dict[str, object]] = []
        base_mb = 0.0
        for size_mb in sizes_mb:
            part = folder / f"{size_mb}"
            part.mkdir()
            train = part / "train.txt"
            _write_text(train, size_mb * MB)
            begin = time.perf_counter()
            peak_mb = _peak_of_training(train, valid, part) / MB
            seconds = time.perf_counter() - begin
            shutil.rmtree(part)
            base_mb = base_mb or peak_mb
            rows.append(
                {"file_mb": size_mb, "peak_rss_anon_mb": peak_mb, "more_mb": peak_mb - base_mb, "bound_mb": BOUND_MB, "seconds": seconds}
            )
    return rows


def _peak_of_training(train: Path, valid: Path, folder: Path) -> int:
    """Peak RssAnon, in bytes, of training on this file in a separate process."""
    command = [sys.executable, "-m", "carrywave", "train", "--device", "cpu", "--run", str(folder / "run")]
    command += [*SETTINGS, f"data.train={train}", f"data.valid={valid}", f"data.cache={folder / 'cache'}"]
    log = folder / "log.txt"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=_environment()) as child:
        try:
            peak = 0
            while child.poll() is None:
                peak = max(peak, memory_bytes("RssAnon", child.pid))
                time.sleep(SAMPLE_SECONDS)
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise RunError(f"training for bench memory exited with code {child.returncode}: {last}")
    return peak


def _environment() -> dict[str, str]:
    """The environment of this process plus its import path, so that the child runs the same carrywave."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _write_text(path: Path, num_bytes: int) -> None:
    """Write lines of made-up words, some far more frequent than others. Deterministic for a given size."""
    random = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", dtype=np.uint8)
    words = [bytes(letters[random.integers(0, 26, size=size)]) for size in random.integers(1, 12, size=5_000)]
    pages = []
    for _ in range(16):
        picked = (random.random(30_000) ** 3 * len(words)).astype(np.int64).tolist()
        lines = (b" ".join(words[word] for word in picked[start : start + 15]) for start in range(0, len(picked), 15))
        pages.append(b"\n".join(lines) + b"\n")
    # Repeat the pages in random order: the content matters little here, the size does.
    with path.open("wb") as out:
        left = num_bytes
        while left > 0:
            page = pages[int(random.integers(len(pages)))][:left]
            out.write(page)
            left -= len(page)
