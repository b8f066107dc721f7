"""Layers divided among devices: each stage holds some of the layers, and time chunks move through the stages as a wavefront.

The batch stays whole, and the gradients are those of back-propagation through the whole window. With several replicas of the stages
(hybrid), the lanes are divided as well.

    python examples/stages.py           # 2 stages: 2 workers
    python examples/stages.py 3         # 3 stages: 3 workers
    python examples/stages.py 2 2       # 2 stages x 2 replicas: 4 workers
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import carrywave as cw
from carrywave.plan.schedule.schedule import show, wavefront

STEPS, CHUNK_STEPS = 32, 8


def train(text: str, stages: int, replicas: int) -> dict[str, float]:
    """Metrics of a small four-layer character model on the held-out part of the text."""
    result = cw.fit(
        {"hidden": 24, "layers": 4, "dropout": 0.1},
        text,
        task="language",
        batch={"lanes": 8, "steps": STEPS},
        train={"lr": 1e-2, "epochs": 1, "clip": 1.0, "precision": "fp64"},  # fp64: only the order of summation differs
        devices=replicas * stages,
        plan={"replicas": replicas, "stages": stages, "chunk_steps": CHUNK_STEPS},
    )
    return result.metrics["valid"]


def main(stages: int = 2, replicas: int = 1, characters: int = 12_000) -> None:
    """Train on one device and on all, and compare the losses."""
    text = "".join(topics.values())[:characters]
    alone, together = train(text, 1, 1), train(text, stages, replicas)
    print(show(wavefront(stages, STEPS // CHUNK_STEPS)))
    print(f"1 device: loss {alone['loss']:.5f}")
    print(f"{replicas} x {stages} (replicas x stages): loss {together['loss']:.5f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
