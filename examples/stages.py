"""Layers over devices: each stage holds some of the layers, and chunks of time move through the stages as a wave.

The batch stays whole, and the gradients are those of back-propagation through the whole window. With several replicas of the
stages (a hybrid) the lanes are shared as well.

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
    """Loss of a small character model of four layers on the part of the text that is held out."""
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
    """Train on one device and on all, and compare."""
    text = "".join(topics.values())[:characters]
    alone, together = train(text, 1, 1), train(text, stages, replicas)
    print(show(wavefront(stages, STEPS // CHUNK_STEPS)))
    print(f"1 device: loss {alone['loss']:.5f}")
    print(f"{replicas} x {stages} (replicas x stages): loss {together['loss']:.5f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
