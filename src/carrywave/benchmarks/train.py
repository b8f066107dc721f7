"""Claim: our loop trains at least as fast as the loop a good engineer writes by hand, and faster if lengths vary.

Ours and the peers run in the same process, on the same data, with the same model, optimizer and clipping, and take turns (a block of steps
each, for several rounds; the median over blocks counts):

- streams: truncated back-propagation over the same corpus in the same lanes and windows (`PlainStreams`);
- lengths: a DataLoader in random order with `pad_sequence`, padded or packed, whichever is faster, with as many sequences per batch as
  give the same number of real steps on average (`PlainSequences`). Ours buckets by length.

Speed is in real tokens per second: padding does not count. The plain loops use torch's default settings.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from carrywave.benchmarks.peers import plain_loops as peers
from carrywave.data.batch import Batch
from carrywave.data.codec import Codec
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor, Order
from carrywave.data.sequences import Sequences
from carrywave.data.view import View
from carrywave.parallel.mesh import Mesh
from carrywave.runs.evaluation import order_for
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.step.trainer import Trainer
from carrywave.tasks.task import Task

title = "training against a hand-written loop"
COLUMNS = ("case", "device", "loop", "tokens_per_second", "spread", "ratio", "target")

Step = Callable[[], int]  # runs one optimizer step and returns its real tokens

LR, CLIP = 1e-3, 1.0
FEATURES, CLASSES = 16, 10


def run(*, quick: bool = False) -> list[dict[str, object]]:
    """Both cases, on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks, seconds = (3, 0.3) if quick else (9, 2.0)
    rows: list[dict[str, object]] = []
    shapes = [(100, 64 if quick else 256, 32, 64)]
    if device.type == "cuda":
        shapes += [(10_000, 650, 20, 35), (1_000, 1024, 64, 128)]
    for vocabulary, hidden, lanes, steps in shapes:
        case = f"streams 2x{hidden} lanes {lanes} steps {steps} vocabulary {vocabulary}"
        rows += compare(case, _streams(vocabulary, hidden, lanes, steps, device), blocks, seconds, device, target=1.0)
    hidden, longest, tokens = (32, 200, 1024) if quick else (128, 1000, 4096)
    case = f"lengths 1x{hidden} log-normal 5..{longest} batch {tokens}"
    rows += compare(case, _lengths(hidden, longest, tokens, device), blocks, seconds, device, target=1.5)
    return rows


def compare(case: str, loops: dict[str, Step], blocks: int, seconds: float, device: torch.device, target: float) -> list[dict[str, object]]:
    """Run the loops in turn; the ratio is to the best of the peers."""
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for step in loops.values():
        _block(step, seconds / 4, device)  # warm up
    for _ in range(blocks):
        for name, step in loops.items():
            rates[name].append(_block(step, seconds, device))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(value for name, value in medians.items() if name != "carrywave")
    return [
        {
            "case": case,
            "device": _name(device),
            "loop": name,
            "tokens_per_second": round(medians[name]),
            "spread": round((max(values) - min(values)) / medians[name], 3),
            "ratio": round(medians[name] / best, 3),
            "target": target if name == "carrywave" else None,
        }
        for name, values in rates.items()
    ]


def _block(step: Step, seconds: float, device: torch.device) -> float:
    """Tokens per second over a block of at least this many seconds and three steps."""
    _wait(device)
    begin, tokens, done = time.perf_counter(), 0, 0
    while time.perf_counter() - begin < seconds or done < 3:
        tokens += step()
        done += 1
        if device.type == "cuda" and done % 16 == 0:
            _wait(device)  # so that the clock measures completed work, not queued work
    _wait(device)
    return tokens / (time.perf_counter() - begin)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def _ours(spec: Spec, codec: Codec, data: Sequences, device: torch.device) -> Step:
    """A loop over our trainer and loader, epoch after epoch."""
    task = Task.of(spec, codec, codec.facts(data), data)
    view = task.part("train", data).view
    order = order_for(spec, view, training=True)
    trainer = Trainer(task.model(data), spec.train, mesh=Mesh.alone(device), keep_state=spec.streams)
    batches = _forever(view, order, device)

    def step() -> int:
        batch = next(batches)
        trainer.update(batch)
        return batch.real

    return step


def _forever(view: View, order: Order, device: torch.device) -> Iterator[Batch]:
    loader, epoch = Loader(view, order, device=device), 0
    while True:
        yield from loader.batches(Cursor(epoch, 0))
        epoch += 1


def _streams(vocabulary: int, hidden: int, lanes: int, steps: int, device: torch.device) -> dict[str, Step]:
    tokens = np.random.default_rng(0).integers(vocabulary, size=lanes * steps * 200).astype(np.uint16)
    spec = parse(
        {
            "task": "language",
            "model": {"hidden": hidden, "layers": 2, "dropout": 0.2},
            "batch": {"lanes": lanes, "steps": steps},
            "train": {"optimizer": "adam", "lr": LR, "clip": CLIP, "precision": "fp32"},
        }
    )
    data = Sequences(tokens, np.array([0]), np.array([len(tokens)]))
    codec = Codec(task="language", field="tokens", kind="int", size=vocabulary)
    plain = peers.PlainStreams(
        torch.from_numpy(tokens.astype(np.int64)),
        peers.PlainLanguageModel(vocabulary, hidden, 2, 0.2),
        lanes=lanes,
        steps=steps,
        lr=LR,
        clip=CLIP,
        device=device,
    )
    return {"carrywave": _ours(spec, codec, data, device), "plain PyTorch": plain.step}


def _lengths(hidden: int, longest: int, tokens: int, device: torch.device) -> dict[str, Step]:
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(math.log(80), 1.0, 4000)), 5, longest).astype(np.int64)
    inputs = draw.standard_normal((int(lengths.sum()), FEATURES)).astype(np.float32)
    labels = draw.integers(CLASSES, size=len(lengths))
    starts = np.cumsum(lengths) - lengths
    spec = parse(
        {
            "task": "classification",
            "model": {"hidden": hidden, "layers": 1},
            "batch": {"tokens": tokens},
            "train": {"optimizer": "adam", "lr": LR, "clip": CLIP, "precision": "fp32"},
        }
    )
    codec = Codec(
        task="classification",
        field="steps",
        labels=tuple(str(label) for label in range(CLASSES)),
        columns=tuple(f"x{i}" for i in range(FEATURES)),
    )
    data = Sequences(inputs, starts, lengths, labels=labels)
    sequences: Sequence[torch.Tensor] = torch.split(torch.from_numpy(inputs), lengths.tolist())
    batch = max(1, round(tokens / float(lengths.mean())))

    def plain(packed: bool) -> Step:
        model = peers.PlainClassifier(FEATURES, hidden, 1, CLASSES, packed=packed)
        return peers.PlainSequences(list(sequences), labels.tolist(), model, batch=batch, lr=LR, clip=CLIP, device=device).step

    return {"carrywave": _ours(spec, codec, data, device), "plain PyTorch, padded": plain(False), "plain PyTorch, packed": plain(True)}
