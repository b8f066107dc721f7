"""Data parallelism: copies of the model on N devices divide the lanes of every batch and reach the same weights as one device.

cw.fit(devices=N) starts N workers on this machine, one per GPU or on the CPU. They run this script again up to that call; the code after it
runs only once, in this process. Dropout is keyed by lane and step, not by worker, so its masks are also the same.

    python examples/replicas.py         # 2 workers
    python examples/replicas.py 4
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import carrywave as cw


def train(text: str, devices: int) -> dict[str, float]:
    """Loss and perplexity of a small character model on the held-out part of the text."""
    result = cw.fit(
        {"hidden": 32, "layers": 2, "dropout": 0.2},
        text,
        task="language",
        batch={"lanes": 16, "steps": 32},
        train={"lr": 1e-2, "epochs": 2, "clip": 1.0, "precision": "fp64"},  # fp64: only the order of summation differs
        devices=devices,
    )
    return result.metrics["valid"]


def main(devices: int = 2, characters: int = 20_000) -> None:
    """Train on one device and on several, and compare."""
    text = "".join(topics.values())[:characters]  # English prose that ships with Python
    alone, together = train(text, 1), train(text, devices)
    print(f"1 device:   loss {alone['loss']:.5f}, perplexity {alone['perplexity']:.3f}")
    print(f"{devices} replicas: loss {together['loss']:.5f}, perplexity {together['perplexity']:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
