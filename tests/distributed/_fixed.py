"""How near is near enough, and cases that are written by hand: where one property is asked for, a drawn case might not have it."""

from __future__ import annotations

from typing import Any

from _cases import Case, changed

LIMIT = 1e-10  # in float64
# Terms of order one, some hundreds of them, each rounded at 1e-16: 1e-14 is what a sum that cancels may be off by.
FLOOR = 1e-4


def a_case(**fields: Any) -> Case:
    """Two layers over a stream of words in five lanes, two windows a step, on two replicas; fields as `changed` takes them."""
    lengths = [[6, 6, 6, 6, 6], [4, 0, 6, 3, 1], [5, 5, 5, 5, 5], [2, 6, 0, 6, 6]]
    fresh = [[True] * 5, [False, True, False, True, False], [False] * 5, [True, False, False, False, True]]
    windows = [{"steps": max(each), "lengths": each, "fresh": new} for each, new in zip(lengths, fresh, strict=True)]
    case: Case = {
        "seed": 5,
        "task": "language",
        "model": {
            "numbers": False,
            "own_encoder": False,
            "input": 5,
            "widths": [5, 5],
            "projection": 0,
            "tie": True,
            "bidirectional": False,
            "layer_norm": True,
            "learned_carry": True,
            "locked": False,
            "dropout": 0.3,
            "weight_drop": 0.2,
            "dropout_words": 0.1,
            "dropout_in": 0.2,
            "dropout_out": 0.2,
            "class_weights": False,
            "pool": "last",
            "quantiles": False,
        },
        "groups": [windows[:2], windows[2:3], windows[3:]],
        "train": {"optimizer": "adam", "lr": 0.01, "clip": 0.5, "seed": 3, "precision": "fp64", "alpha": 0.5, "beta": 0.3},
        "plan": a_plan(replicas=2),
    }
    return changed(case, **fields)


def a_plan(**fields: Any) -> dict[str, Any]:
    return {
        "replicas": 1,
        "stages": 1,
        "cuts": [],
        "chunk_steps": None,
        "micro_batches": 1,
        "recompute": False,
        "share_head": False,
        **fields,
    }


def sequences(**fields: Any) -> Case:
    """Classes of short sequences of numbers, the last real step read; a batch of one lane among them."""
    groups = [[{"steps": 5, "lengths": [5, 2, 3, 1, 4], "fresh": [True] * 5}], [{"steps": 3, "lengths": [3], "fresh": [True]}]]
    case = a_case(task="classification", model__numbers=True, model__tie=False, groups=groups)
    return changed(case, **fields)


def windows_of_64(**fields: Any) -> Case:
    """Streams of 100 and of 120 rows in windows of 64: the second window is not full, and both are one step."""
    windows = [
        {"steps": 64, "lengths": [64, 64], "fresh": [True, True]},
        {"steps": 56, "lengths": [36, 56], "fresh": [False, False]},
    ]
    return a_case(groups=[windows], **fields)


SHARED = {
    "head shared": a_plan(stages=2, cuts=[2], chunk_steps=2, share_head=True),
    "head shared by replicas": a_plan(replicas=2, stages=2, cuts=[3], chunk_steps=2, micro_batches=2, share_head=True),
    "head shared by three": a_plan(stages=3, cuts=[1, 2], chunk_steps=1, share_head=True),
}
LONG = {
    "three stages": a_plan(stages=3, cuts=[1, 2], chunk_steps=1),
    "four stages": a_plan(stages=4, cuts=[1, 2, 3], chunk_steps=2, micro_batches=2),
    "head shared by four": a_plan(stages=4, cuts=[1, 2, 3], chunk_steps=1, micro_batches=2, share_head=True),
}
PLANS = {
    "replicas": a_plan(replicas=2),
    "stages": a_plan(stages=2, cuts=[2], chunk_steps=2),
    "both": a_plan(replicas=2, stages=2, cuts=[3], chunk_steps=2, micro_batches=2),
}
