"""Hypothesis strategies for cases: models, tasks, lengths, accumulation, and plans of so many workers."""

from __future__ import annotations

from typing import Any

from _cases import CELLS
from hypothesis import strategies as st

from carrywave.model.over_time.pooling import POOLS

Case = dict[str, Any]
TASKS = ("language", "tagging", "classification", "regression", "forecasting")
STEPWISE = ("language", "tagging", "forecasting")  # each step has a score, so that several stages can share the head
STEPS = 3  # optimizer steps of a case
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.5},
    "momentum": {"optimizer": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


@st.composite
def cases(draw: st.DrawFn, workers: int, *, precision: str = "fp64", optimizers: tuple[str, ...] = tuple(OPTIMIZERS)) -> Case:
    """Anything that so many workers can train."""
    replicas = draw(st.sampled_from([number for number in range(1, workers + 1) if workers % number == 0]))
    stages = workers // replicas
    task = draw(st.sampled_from(TASKS))
    layers = draw(st.integers(max(1, stages - 2), 4))
    micro_batches = draw(st.integers(1, 3))
    chance = st.booleans()
    model = draw(_models(task, layers))
    regular = draw(st.sampled_from([(0.0, 0.0), (0.6, 0.4), (0.0, 0.5), (0.3, 0.0)]))
    return {
        "seed": draw(st.integers(0, 10_000)),
        "task": task,
        "model": model,
        "weights": draw(st.sampled_from((None, "lane", "step", "ahead"))),
        "resets": None if model["front"] else draw(st.sampled_from((None, 0.1, 0.5))),
        "groups": draw(_streams(replicas * micro_batches) if task in ("language", "forecasting") else _sequences()),
        "train": {
            **OPTIMIZERS[draw(st.sampled_from(optimizers))],
            "clip": draw(st.sampled_from([None, 0.1, 1.0])),
            "alpha": regular[0],
            "beta": 0.0 if model["front"] else regular[1],
            "seed": draw(st.integers(0, 100)),
            "precision": precision,
        },
        "plan": {
            "replicas": replicas,
            "stages": stages,
            "cuts": sorted(draw(st.permutations(range(1, layers + 2)))[: stages - 1]),
            "chunk_steps": None if model["front"] else draw(st.none() | st.integers(1, 5)),
            "micro_batches": micro_batches,
            "recompute": draw(st.sampled_from((False, True, "twice"))),
            "share_head": task in STEPWISE and draw(chance),
        },
    }


@st.composite
def _models(draw: st.DrawFn, task: str, layers: int) -> dict[str, Any]:
    chance = st.booleans()
    share = st.sampled_from((0.3, 0.0, 0.5))
    numbers = task == "forecasting" or (task != "language" and draw(chance))
    # Layer norm of two units puts out plus or minus one and passes no gradient: at least three.
    widths = [draw(st.integers(4, 7))] * layers if draw(chance) else draw(st.lists(st.integers(4, 7), min_size=layers, max_size=layers))
    cell = draw(st.sampled_from(("lstm", *CELLS)))  # the LSTM as often as any other, and where a case shrinks to
    projection = draw(st.sampled_from((0, 3))) if CELLS[cell].cell.projects else 0
    tie = task == "language" and draw(chance)
    front = draw(_fronts(task)) if task not in ("language", "forecasting") and draw(chance) else []
    model = {
        "numbers": numbers,
        "own_encoder": numbers and not front and draw(chance),
        "input": (projection or widths[-1]) if tie else draw(st.integers(3, 6)),
        "widths": widths,
        "cell": cell,
        "projection": projection,
        "tie": tie,
        "bidirectional": task not in ("language", "forecasting") and draw(chance),
        "layer_norm": draw(chance),
        "cell_norm": draw(chance),
        "heads": 2 if not projection and not any(width % 2 for width in widths) and draw(chance) else 1,
        "learned_carry": draw(chance),
        "locked": draw(chance),
        "dropout": draw(share),
        "weight_drop": draw(share),
        "recurrent_dropout": draw(share),
        "zoneout": draw(share),
        "dropout_words": draw(share),
        "dropout_in": draw(share),
        "dropout_out": draw(share),
        "class_weights": task in ("tagging", "classification") and draw(chance),
        "multi_label": task in ("tagging", "classification") and draw(chance),
        "pool": draw(st.sampled_from(POOLS)),
        "label_smoothing": draw(st.sampled_from((0.0, 0.1))),
        "front": front,
        "quantiles": draw(chance),
        "past": draw(st.sampled_from((0, 1, 4))) if task == "forecasting" else 0,
    }
    if not any(model[kind] for kind in ("dropout", "weight_drop", "dropout_in", "dropout_out")):
        model["dropout_out"] = 0.3  # dropout is on in every case
    return model


@st.composite
def _fronts(draw: st.DrawFn, task: str) -> list[tuple[int, int, int]]:
    """Channels, kernel and stride of each layer; a layer norm of two channels passes no gradient."""
    strides = st.just(1) if task == "tagging" else st.integers(1, 3)
    return draw(st.lists(st.tuples(st.integers(3, 6), st.sampled_from((1, 3, 5)), strides), min_size=1, max_size=3))


def _lengths(draw: st.DrawFn, steps: int, lanes: int) -> list[int]:
    """Of each lane: all steps, none of them, or some."""
    if draw(st.booleans()):
        return [steps] * lanes
    return draw(st.lists(st.integers(0, steps), min_size=lanes, max_size=lanes))


@st.composite
def _streams(draw: st.DrawFn, least: int) -> list[list[dict[str, Any]]]:
    """Windows of lanes that go on from one to the next; here and there the number of lanes changes, and all of them start anew."""
    lanes = draw(st.integers(least, least + 3))
    groups: list[list[dict[str, Any]]] = []
    for number in range(STEPS):
        group = []
        for _ in range(draw(st.integers(1, 3))):
            begins = not groups and not group
            if not begins and draw(st.integers(0, 5)) == 5:
                lanes, begins = draw(st.integers(least, least + 3)), True
            fresh = [True] * lanes if begins else draw(st.lists(st.booleans(), min_size=lanes, max_size=lanes))
            steps = draw(st.integers(1, 8))
            # The first step has targets in any case, or its gradients would say nothing.
            lengths = [steps] * lanes if begins and number == 0 else _lengths(draw, steps, lanes)
            group.append({"steps": steps, "lengths": lengths, "fresh": fresh})
        groups.append(group)
    return groups


@st.composite
def _sequences(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Batches of separate sequences: any number of lanes, also fewer than there are replicas or micro-batches."""
    groups = []
    for number in range(STEPS):
        group = []
        for place in range(draw(st.integers(1, 3))):
            lanes, steps = draw(st.integers(1, 6)), draw(st.integers(1, 8))
            lengths = _lengths(draw, steps, lanes)
            if number == place == 0:
                lengths[draw(st.integers(0, lanes - 1))] = steps
            group.append({"steps": steps, "lengths": lengths, "fresh": [True] * lanes})
        groups.append(group)
    return groups
