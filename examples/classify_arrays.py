"""Classify sequences of different lengths held in memory as NumPy arrays: no files, padding or loader needed.

python examples/classify_arrays.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import carrywave as cw

NAMES = ("rising", "falling", "waving")


def curves(number: int, seed: int) -> tuple[list[np.ndarray], list[str]]:
    """Noisy curves of 10 to 40 steps with two numbers per step, and the label of each."""
    draw = np.random.default_rng(seed)
    inputs, labels = [], []
    for _ in range(number):
        time = np.linspace(0, 1, int(draw.integers(10, 41)))
        name = str(draw.choice(NAMES))
        shape = {"rising": time, "falling": 1 - time, "waving": np.sin(12 * time)}[name]
        inputs.append(np.stack([shape, shape**2], axis=1) + draw.normal(scale=0.2, size=(len(time), 2)))
        labels.append(name)
    return inputs, labels


def main(number: int = 600, epochs: int = 10, hidden: int = 32, run: Path | None = None) -> float:
    """Train and predict; returns the accuracy on unseen curves."""
    data = {"train": curves(number, seed=1), "test": curves(number // 3, seed=2)}
    result = cw.fit(
        {"hidden": hidden, "layers": 1, "pool": "mean"},
        data,
        task="classification",
        batch={"tokens": 1024},
        train={"lr": 1e-2, "epochs": epochs, "clip": 1.0},
        run=run,
    )
    print(f"{result.run}: test accuracy {result.metrics['test']['accuracy']:.3f}, macro F1 {result.metrics['test']['macro_f1']:.3f}")
    inputs, labels = curves(3, seed=3)
    for row, label in zip(cw.predict(result.run, inputs), labels, strict=True):
        print(f"{label:8} taken for {row['label']} ({row['probability']:.2f})")
    return result.metrics["test"]["accuracy"]


if __name__ == "__main__":
    main()
