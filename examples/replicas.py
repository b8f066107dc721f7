"""Data parallel: copies of the model on N devices share the lanes of every batch, and train to the weights of one device.

cw.fit(devices=N) starts N workers on this machine, one for each GPU or on the CPU. They run this script again up to that call; what
follows it happens once, here. Dropout is keyed by lane and step, not by worker, so its masks are the same too.

    python examples/replicas.py         # 2 workers
    python examples/replicas.py 4
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import carrywave as cw


def train(text: str, devices: int) -> dict[str, float]:
    """Loss and perplexity of a small character model on the part of the text that is held out."""
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
    """Train alone and together, and compare."""
    text = "".join(topics.values())[:characters]  # English prose that ships with Python
    alone, together = train(text, 1), train(text, devices)
    print(f"1 device:   loss {alone['loss']:.5f}, perplexity {alone['perplexity']:.3f}")
    print(f"{devices} replicas: loss {together['loss']:.5f}, perplexity {together['perplexity']:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
