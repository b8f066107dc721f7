"""A case is a row of the table, as plain data: what is trained, how, and by which plan. Workers train it here; answers are compared."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _models import KINDS, KINDS_OF_TABLE, STEPWISE, batch, model
from _workers import Workers
from torch import Tensor

import carrywave as cw

Case = dict[str, Any]
LIMIT = 1e-10  # in float64
FLOOR = 1e-4  # the least that is divided by: some hundreds of terms of order one, each rounded at 1e-16, may cancel

PLANS: dict[str, dict[str, Any]] = {
    "1": {},
    "1, chunks": {"chunk_steps": 2},
    "1, chunks recomputed": {"chunk_steps": 2, "recompute": True},
    "1, chunks recomputed twice": {"chunk_steps": 1, "recompute": "twice"},
    "1, micro-batches": {"micro_batches": 3},
    "2x1": {"replicas": 2},
    "2x1, chunks, micro-batches": {"replicas": 2, "chunk_steps": 3, "micro_batches": 2, "recompute": True},
    "3x1": {"replicas": 3},
    "4x1": {"replicas": 4, "recompute": True},
    "1x2": {"stages": 2, "cuts": [2], "chunk_steps": 2},
    "1x2, micro-batches": {"stages": 2, "cuts": [1], "micro_batches": 3},
    "1x2, shared head": {"stages": 2, "cuts": [2], "chunk_steps": 2, "share_head": True},
    "1x3": {"stages": 3, "cuts": [1, 3], "chunk_steps": 1, "recompute": "twice"},
    "1x3, shared head": {"stages": 3, "cuts": [1, 2], "chunk_steps": 1, "share_head": True},
    "1x4": {"stages": 4, "cuts": [1, 2, 3], "chunk_steps": 2, "micro_batches": 2},
    "2x2": {"replicas": 2, "stages": 2, "cuts": [3], "chunk_steps": 2},
    "2x2, micro-batches": {"replicas": 2, "stages": 2, "cuts": [2], "micro_batches": 2, "recompute": True},
    "2x2, shared head": {"replicas": 2, "stages": 2, "cuts": [3], "chunk_steps": 2, "micro_batches": 2, "share_head": True},
}
DATA = {
    "whole": {},
    "lengths": {"lengths": True},
    "resets": {"resets": True, "lengths": True},
    "carried": {"carried": True, "lengths": True},
    "carried, resets, accumulated": {"carried": True, "resets": True, "lengths": True, "accumulated": True},
    "accumulated": {"lengths": True, "accumulated": True},
    "weights": {"lengths": True, "weights": True},
    "few lanes": {"lengths": True, "few": True},
}
DROPOUT: dict[str, dict[str, Any]] = {
    "none": {},
    "between": {"dropout": 0.3},
    "locked": {"dropout": 0.3, "locked": True},
    "weights": {"weight_drop": 0.3},
    "in the cell": {"recurrent_dropout": 0.3, "zoneout": 0.2},
    "all": {"dropout": 0.3, "weight_drop": 0.2, "recurrent_dropout": 0.3, "zoneout": 0.2},
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "widths": {"widths": [7, 5, 6], "learned_carry": True},
    "norms": {"layer_norm": True, "cell_norm": True},
    "projection": {"proj_size": 3, "layer_norm": True},
    "heads": {"num_heads": 2},
    "both ways": {"bidirectional": True, "learned_carry": True},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.5},
    "momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "clip": 0.5},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip": 0.5},
    "penalties": {"optimizer": "sgd", "lr": 0.1, "alpha": 0.5, "beta": 0.3, "clip": 1.0},
    "averaged": {"optimizer": "sgd", "lr": 0.1, "ema": 0.5},
}
LOOPS = ("step", "backward", "resumed")
FACTORS = {
    "plan": tuple(PLANS),
    "head": KINDS_OF_TABLE,
    "cell": ("lstm", "gru", "rnn", "rnn_relu", "slstm", "odd"),
    "data": tuple(DATA),
    "dropout": tuple(DROPOUT),
    "layers": tuple(LAYERS),
    "optimizer": tuple(OPTIMIZERS),
    "loop": LOOPS,
}


def fits(row: dict[str, str]) -> bool:
    """False if the documentation says that these do not go together."""
    head, plan, data = KINDS.get(row.get("head", "own")), PLANS[row.get("plan", "1")], DATA[row.get("data", "whole")]
    layers, cell = row.get("layers", "plain"), row.get("cell", "lstm")
    assert head is not None
    whole = head.whole or layers == "both ways"
    return not (
        (whole and plan.get("chunk_steps"))
        or (plan.get("share_head") and row.get("head", "own") not in STEPWISE)
        or (data.get("carried") and (whole or head.pooled))
        or (data.get("resets") and (head.whole or head.pooled or head.reads == "own"))  # modules of a user know of none
        or (data.get("weights") and row.get("head") in ("own chain", "ctc", "crf"))
        or (data.get("few") and plan.get("chunk_steps"))
        or (layers == "projection" and cell not in ("lstm", "odd"))
        or (layers == "both ways" and row.get("head") == "tied words")
        or (layers == "projection" and row.get("head") == "adaptive softmax")  # its clusters are narrower still
        or (row.get("optimizer") == "penalties" and row.get("head") == "max of a front")
    )


@dataclass
class Answer:
    """What training came to. The weights are on rank 0 alone."""

    numbers: dict[str, float]  # the loss of each step, and of an evaluation at the end
    digests: dict[str, str]  # of each weight that this worker holds, to the last bit
    weights: dict[str, Tensor]  # after the first step and after the last: without Adam, the first are the first gradients too
    replays: int = 0  # steps or parts of steps that came from a recorded CUDA graph


def plan_of(case: Case) -> dict[str, Any]:
    plan = case["plan"]
    return plan if isinstance(plan, dict) else PLANS[plan]


def workers_of(case: Case) -> int:
    plan = plan_of(case)
    return int(plan.get("replicas", 1)) * int(plan.get("stages", 1))


def net(case: Case) -> cw.Model:
    dropout, layers = DROPOUT[case["dropout"]], dict(LAYERS[case["layers"]])
    made = model(case["head"], case["cell"], {**layers, **dropout}, drop=case["dropout"] != "none", seed=case.get("seed", 5))
    return made.to(getattr(torch, case.get("dtype", "float64")))


def steps_of(case: Case) -> list[list[cw.Batch]]:
    """The batches of three steps: five lanes, of which some end early or have no step at all, or go on from step to step."""
    data = DATA[case["data"]]
    lengths = [[6, 6, 6, 6, 6], [4, 0, 6, 3, 1], [5, 5, 5, 5, 5], [2, 6, 0, 6, 6]]
    fresh = [[True] * 5, [False, True, False, True, False], [False] * 5, [True, False, False, False, True]]
    if data.get("few"):
        lengths = [[6, 2], [3], [5, 1, 4], [2]]
    made = []
    for number, (given, new) in enumerate(zip(lengths, fresh, strict=True)):
        steps = max(given) if data.get("lengths") else 6
        real = given if data.get("lengths") else [6] * len(given)
        kinds = {name: bool(data.get(name)) for name in ("resets", "weights")}
        carried = {"fresh": new} if data.get("carried") else {}
        made.append(batch(case["head"], steps, real, **kinds, **carried, seed=number, odd=bool(case.get("odd"))))
    if case.get("huge"):  # the targets of one lane, which only one replica holds, are too large for half precision
        assert made[0].targets is not None
        made[0].targets[0] *= 1e6
    groups = [made[:2], made[2:3], made[3:]] if data.get("accumulated") else [[each] for each in made[:3]]
    return groups * int(case.get("repeats", 1))


def train(case: Case, *, device: str = "cpu") -> Answer:
    """Train the case on its plan, in this process or in all that were started for it."""
    keys = {**OPTIMIZERS[case["optimizer"]], "seed": 3, **case.get("keys", {})}
    trainer = cw.Trainer(net(case).to(device), keys, plan=plan_of(case), device=device)
    numbers: dict[str, float] = {}
    weights: dict[str, Tensor] = {}
    for number, batches in enumerate(steps_of(case)):
        if case["loop"] == "backward":
            loss = trainer.backward(*batches)
            trainer.apply()
        else:
            loss = trainer.step(*batches)
        numbers[f"loss {number}"] = float(loss)
        if number == 0:
            weights |= {f"first {name}": tensor.cpu().clone() for name, tensor in trainer.gathered().items()}
            if case["loop"] == "resumed":
                state = trainer.state_dict()
                trainer = cw.Trainer(net({**case, "seed": 6}).to(device), keys, plan=plan_of(case), device=device)
                trainer.load_state_dict(state)
    numbers["evaluation"] = trainer.evaluate([steps_of(case)[0][0]])
    weights |= {f"last {name}": tensor.cpu().clone() for name, tensor in trainer.gathered().items()}
    replays = 0 if trainer.capture is None else sum(trainer.capture.replays.values())
    held = {name: p for name, p in trainer.model.named_parameters() if not p.is_meta and p.numel()}
    digests = {name: hashlib.sha256(p.detach().cpu().numpy().tobytes()).hexdigest() for name, p in held.items()}
    return Answer(numbers, digests, weights, replays)


def save(answer: Answer, path: Path) -> None:
    torch.save(vars(answer), path)


def load(path: str | Path) -> Answer:
    return Answer(**torch.load(path, weights_only=True))


def serial(case: Case, device: str = "cpu") -> Answer:
    """The answer: the case on one device, by nothing but steps, with zeros in padding."""
    return train({**case, "plan": "1", "loop": "step", "odd": False}, device=device)


def answered(case: Case, workers: Workers) -> Answer:
    """By the plan of the case; weights that several workers hold are the same on all of them, bit for bit."""
    size = workers_of(case)
    if size == 1:
        return train(case, device=workers.device)
    answers = workers.train(case, size)
    seen: dict[str, str] = {}
    for rank, answer in enumerate(answers):
        assert answer.numbers == answers[0].numbers, f"rank {rank} has other losses than rank 0"
        for name, digest in answer.digests.items():
            assert seen.setdefault(name, digest) == digest, f"{name} of rank {rank} differs in its bits from the same weight elsewhere"
    first: Answer = answers[0]
    return first


def check(case: Case, workers: Workers, *, limit: float, floor: float = FLOOR) -> float:
    """The largest error, which is below the limit."""
    found = errors(answered(case, workers), serial(case), floor=floor)
    worst = max(found, key=found.__getitem__)
    assert found[worst] < limit, f"{worst} is off by {found[worst]:.2g}"
    return found[worst]


def errors(got: Answer, wanted: Answer, *, floor: float = FLOOR) -> dict[str, float]:
    """‖a - b‖ / ‖b‖ of every loss and every weight; infinite where one is missing or no number."""
    found = {}
    for name in got.numbers.keys() | wanted.numbers.keys():
        pair = (torch.tensor(each.numbers.get(name, math.nan), dtype=torch.float64) for each in (got, wanted))
        found[name] = _error(*pair, floor)
    for name in got.weights.keys() | wanted.weights.keys():
        one, other = got.weights.get(name), wanted.weights.get(name)
        found[name] = math.inf if one is None or other is None or one.shape != other.shape else _error(one, other, floor)
    return found


def _error(a: Tensor, b: Tensor, floor: float) -> float:
    error = float((a.double() - b.double()).norm()) / max(float(b.double().norm()), floor)
    return error if math.isfinite(error) else math.inf


def limit_of(case: Case) -> float:
    """Adam divides a gradient by its own size and adds 1e-8: one that is nothing but rounding, 1e-16, moves a weight by 1e-8 of a step."""
    return 1e-8 if case["optimizer"] == "adamw" else LIMIT
