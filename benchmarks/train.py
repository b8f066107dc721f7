"""Claim: our loop trains at least as fast as the loop a good engineer writes by hand, and faster if lengths vary.

Ours and the peers run in the same process, on the same data, with the same model, optimizer and clipping, and take turns (a block of steps
each, for several rounds; the median over blocks counts):

- streams: truncated back-propagation over the same corpus in the same lanes and windows (`PlainStreams`), of LSTMs and, once, of GRUs;
- lengths: a DataLoader in random order with `pad_sequence`, padded or packed, whichever is faster, with as many sequences per batch as
  give the same number of real steps on average (`PlainSequences`). Ours buckets by length.

Speed is in real tokens per second: padding does not count. The plain loops use torch's default settings.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks.harness.command import main
from benchmarks.harness.timing import settle, spread, take_turns
from benchmarks.peers import plain_loops as peers
from carrywave.data.codec import Codec
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor
from carrywave.data.sequences import Sequences
from carrywave.parallel.mesh import Mesh
from carrywave.prediction.evaluation import order_for
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.step.trainer import Trainer
from carrywave.tasks.task import Task

FEATURES, CLASSES = 16, 10
LR, CLIP = 1e-3, 1.0
TRAIN = {"optimizer": "adam", "lr": LR, "clip": CLIP, "precision": "fp32"}

Step = Callable[[], int]  # runs one optimizer step and returns its real tokens


def run(*, quick: bool = False) -> list[dict[str, object]]:
    """All cases, on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks, seconds = (3, 0.3) if quick else (9, 2.0)
    rows: list[dict[str, object]] = []
    small = (100, 64 if quick else 256, 32, 64)
    shapes = [("lstm", *small), ("gru", *small)]
    if device.type == "cuda":
        shapes += [("lstm", 10_000, 650, 20, 35), ("lstm", 1_000, 1024, 64, 128)]
    for cell, vocabulary, hidden, lanes, steps in shapes:
        case = f"streams{' gru' if cell == 'gru' else ''} 2x{hidden} lanes {lanes} steps {steps} vocabulary {vocabulary}"
        rows += compare(case, _streams(vocabulary, hidden, lanes, steps, device, cell), blocks, seconds, device, target=1.0)
    hidden, longest, tokens = (32, 200, 1024) if quick else (128, 1000, 4096)
    name = f"lengths 1x{hidden} log-normal 5..{longest} batch {tokens}"
    return [*rows, *compare(name, _lengths(hidden, longest, tokens, device), blocks, seconds, device, target=1.5)]


def compare(
    case: str, loops: Mapping[str, Step], blocks: int, seconds: float, device: torch.device, target: float
) -> list[dict[str, object]]:
    """Run the loops in turn; the ratio is to the best of the peers."""
    for step in loops.values():
        _block(step, seconds / 4, device)  # warm up
    rates = take_turns({name: partial(_block, step, seconds, device) for name, step in loops.items()}, blocks)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(value for name, value in medians.items() if name != "carrywave")
    return [
        {
            "case": case,
            "device": _name(device),
            "loop": name,
            "tokens_per_second": round(medians[name]),
            "spread": round(spread(values), 3),
            "ratio": round(medians[name] / best, 3),
            "target": target if name == "carrywave" else None,
        }
        for name, values in rates.items()
    ]


def _block(step: Step, seconds: float, device: torch.device) -> float:
    """Tokens per second over a block of at least this many seconds and three steps."""
    settle(device)
    begin, tokens, done = time.perf_counter(), 0, 0
    while time.perf_counter() - begin < seconds or done < 3:
        tokens += step()
        done += 1
        if device.type == "cuda" and done % 16 == 0:
            settle(device)  # so that the clock measures completed work, not queued work
    settle(device)
    return tokens / (time.perf_counter() - begin)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def _streams(vocabulary: int, hidden: int, lanes: int, steps: int, device: torch.device, cell: str = "lstm") -> dict[str, Step]:
    tokens = np.random.default_rng(0).integers(vocabulary, size=lanes * steps * 200).astype(np.uint16)
    spec = parse(
        {
            "task": "language",
            "model": {"cell": cell, "hidden": hidden, "layers": 2, "dropout": 0.2},
            "batch": {"lanes": lanes, "steps": steps},
            "train": TRAIN,
        },
        defaults=False,
    )
    data = Sequences(tokens, np.array([0]), np.array([len(tokens)]))
    codec = Codec(task="language", field="tokens", kind="int", size=vocabulary)
    plain = peers.PlainStreams(
        torch.from_numpy(tokens.astype(np.int64)),
        peers.PlainLanguageModel(vocabulary, hidden, 2, 0.2, nn.GRU if cell == "gru" else nn.LSTM),
        lanes=lanes,
        steps=steps,
        lr=LR,
        clip=CLIP,
        device=device,
    )
    return {"carrywave": _ours(spec, codec, data, device), "plain PyTorch": plain.step}


def _lengths(hidden: int, longest: int, tokens: int, device: torch.device) -> dict[str, Step]:
    """Sequences of log-normal length, each with a label; a batch has about so many real steps."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(math.log(80), 1.0, 4000)), 5, longest).astype(np.int64)
    inputs = draw.standard_normal((int(lengths.sum()), FEATURES)).astype(np.float32)
    labels = draw.integers(CLASSES, size=len(lengths))
    data = Sequences(inputs, np.cumsum(lengths) - lengths, lengths, labels=labels)
    model = {"hidden": hidden, "layers": 1}
    spec = parse({"task": "classification", "model": model, "batch": {"tokens": tokens}, "train": TRAIN}, defaults=False)
    columns = tuple(f"x{number}" for number in range(FEATURES))
    codec = Codec(task="classification", field="steps", labels=tuple(map(str, range(CLASSES))), columns=columns)
    examples = list(zip(torch.split(torch.from_numpy(inputs), lengths.tolist()), labels.tolist(), strict=True))
    batch = max(1, round(tokens / float(lengths.mean())))

    def plain(packed: bool) -> Step:
        model = peers.PlainClassifier(FEATURES, hidden, 1, CLASSES, packed=packed)
        return peers.PlainSequences(examples, model, batch=batch, lr=LR, clip=CLIP, device=device).step

    return {"carrywave": _ours(spec, codec, data, device), "plain PyTorch, padded": plain(False), "plain PyTorch, packed": plain(True)}


def _ours(spec: Spec, codec: Codec, data: Sequences, device: torch.device) -> Step:
    """A loop over our trainer and loader, epoch after epoch."""
    task = Task.of(spec, codec, codec.facts(data), data)
    view = task.part("train", data).view
    trainer = Trainer(task.model(data), spec.train, mesh=Mesh.alone(device), keep_state=spec.streams)
    loader = Loader(view, order_for(spec, view, training=True), device=device)
    batches = (batch for epoch in itertools.count() for batch in loader.batches(Cursor(epoch, 0)))

    def step() -> int:
        batch = next(batches)
        trainer.update(batch)
        return batch.real

    return step


if __name__ == "__main__":
    main("benchmarks.train")
