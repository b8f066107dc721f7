"""Sequences of very different lengths on several devices: bucketed by length to keep padding low, and divided evenly.

A batch has a budget of steps (batch.tokens) and contains sequences of similar length. All workers use the same bucket at each step, so none
waits for another's long sequences; replicas for which a batch has no sequence take part with weight zero. With stages, a batch is cut
into as many time chunks as its length needs. Nothing is packed, dropped or repeated.

    python examples/variable_lengths.py
"""

from __future__ import annotations

import sys

import numpy as np

import carrywave as cw

PLANS = {
    "1 device": {},
    "2 replicas": {"replicas": 2},
    "2 stages": {"stages": 2, "chunk_steps": 16},  # the last chunk of a batch may be shorter
}


def walks(number: int, seed: int) -> tuple[list[np.ndarray], list[str]]:
    """Random walks of 5 to 120 steps that drift up or down."""
    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.uniform(np.log(5), np.log(120), size=number)).astype(int)
    drifts = draw.choice([-0.5, 0.5], size=number)
    inputs = [np.cumsum(draw.normal(drift, 1.0, size=(length, 1)), axis=0) / 10 for drift, length in zip(drifts, lengths, strict=True)]
    return inputs, ["up" if drift > 0 else "down" for drift in drifts]


def main(number: int = 300, epochs: int = 2) -> None:
    """Train with each plan, and compare."""
    data = {"train": walks(number, seed=1), "valid": walks(number // 3, seed=2)}
    reached = {}
    for name, plan in PLANS.items():
        result = cw.fit(
            {"hidden": 16, "layers": 2},
            data,
            task="classification",
            batch={"tokens": 1024},
            train={"lr": 1e-2, "epochs": epochs, "clip": 1.0, "precision": "fp64"},
            devices=plan.get("replicas", 1) * plan.get("stages", 1),
            plan=plan,
        )
        reached[name] = result.metrics["valid"]
    # Print only now: workers of later calls run the code above again.
    for name, values in reached.items():
        print(f"{name:10}: loss {values['loss']:.5f}, accuracy {values['accuracy']:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
