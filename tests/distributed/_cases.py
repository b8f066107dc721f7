"""A case is plain data (JSON): a model, batches, how to train, and a plan. Here it is run, and two runs of it are compared.

Both the tests and the workers that they start load this file. Everything follows from the case: the weights and the data are drawn
from its seed on the CPU in float64, so that every process and every device sees the same numbers.

Shapes: T time, B lane, F features, C numbers that are to be found.
"""

from __future__ import annotations

import copy
import hashlib
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from carrywave.benchmarks.pipeline import SCHEDULERS
from carrywave.data.batch import Batch
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import PooledNumbers, PooledSigmoid, PooledSoftmax
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.heads.word_scores import WordScores
from carrywave.model.initialization import initialize
from carrywave.model.model import Model
from carrywave.model.over_time.front import Front
from carrywave.model.vocabulary.spelled_words import SpelledWords
from carrywave.parallel.gather import collect
from carrywave.parallel.mesh import Mesh
from carrywave.plan.plan import Plan
from carrywave.spec.data_spec import COUNTS
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "cells"))
sys.path.insert(0, str(Path(__file__).parents[1] / "step"))
from _chain import Chain
from _odd import CELLS

Case = dict[str, Any]

VOCABULARY, FEATURES, CLASSES, HORIZON, NUMBERS = 9, 3, 4, 2, 2
CHARACTERS, LETTERS = 7, 3  # codes of characters, and how many of a word are read
SPANS = ("B-x", "B-y", "O", "I-x")  # the names of the classes for a CRF: the last one may not follow everything
POOLED = ("classification", "regression", "transcription")
STREAMS = ("language", "forecasting", "steps")  # steps: regression at every step


@dataclass
class Run:
    """What a run of a case came to. Gradients and weights are those of the whole model, on rank 0 alone."""

    losses: list[float]
    norms: list[float]
    finite: list[bool]
    scale: float | None  # of the fp16 loss, after the last step
    digests: dict[str, str]  # of each weight that this worker holds and of what the optimizer keeps of it, to the last bit
    replays: int = 0  # whole steps that came from a recording
    failure: str = ""  # why there was no recording
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step: divided, clipped
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the last step

    def bits(self) -> dict[str, Tensor]:
        """Everything that a repetition must give bit for bit."""
        numbers = {"losses": torch.tensor(self.losses), "norms": torch.tensor(self.norms)}
        return numbers | {f"gradient {k}": v for k, v in self.gradients.items()} | {f"weight {k}": v for k, v in self.weights.items()}


def plan_of(case: Case) -> Plan:
    return Plan(**{**case["plan"], "cuts": tuple(case["plan"]["cuts"])})


def model_of(case: Case) -> Model:
    asked, task = case["model"], case["task"]
    tokens = not asked["numbers"]
    encoder: nn.Module
    if tokens:
        encoder = Embedding(VOCABULARY, asked["input"], asked["dropout_words"])
    elif asked["own_encoder"]:
        encoder = nn.Sequential(nn.Linear(FEATURES, asked["input"]), nn.Tanh(), nn.Dropout(0.2))
    else:
        encoder = Numbers(FEATURES)
    width = asked["input"] if tokens or asked["own_encoder"] else FEATURES
    if asked.get("characters"):
        assert isinstance(encoder, Embedding)
        encoder.rare = (VOCABULARY // 2, VOCABULARY - 1, 0.5)
        encoder = SpelledWords(encoder, asked["characters"], CHARACTERS, LETTERS, 4, 6)
        width = encoder.width
    if asked.get("front"):
        layers = [{"channels": channels, "kernel": kernel, "stride": stride} for channels, kernel, stride in asked["front"]]
        encoder = Front(encoder if tokens else width, layers, dropout=0.2)
        width = encoder.width
    lstm = CELLS[asked.get("cell", "lstm")](
        width,
        asked["widths"],
        len(asked["widths"]),
        dropout=asked["dropout"],
        bidirectional=asked["bidirectional"],
        proj_size=asked["projection"],
        locked=asked["locked"],
        weight_drop=asked["weight_drop"],
        recurrent_dropout=asked.get("recurrent_dropout", 0.0),
        zoneout=asked.get("zoneout", 0.0),
        layer_norm=asked["layer_norm"],
        cell_norm=asked.get("cell_norm", False),
        learned_carry=asked["learned_carry"],
        num_heads=asked.get("heads", 1),
    )
    width = lstm.output_size
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0]) if asked["class_weights"] else None
    head: nn.Module
    match task:
        case "language":
            head = Softmax(width, VOCABULARY, tied=encoder.weight if asked["tie"] else None)  # type: ignore[arg-type]
            if asked.get("adaptive"):
                head = AdaptiveSoftmax(width, VOCABULARY, [3])
        case "tagging":
            smoothing = asked.get("label_smoothing", 0.0)
            kind = Sigmoid if asked.get("multi_label") else Softmax
            head = Chain(width, CLASSES) if asked.get("chain") else kind(width, CLASSES, weights=weights, label_smoothing=smoothing)
            words = WordScores(64, len(SPANS), "aBb1.", CHARACTERS, LETTERS) if asked.get("word_scores") else None
            head = CRF(width, SPANS, words=words) if asked.get("crf") else head
        case "classification":
            pooled = PooledSigmoid if asked.get("multi_label") else PooledSoftmax
            head = pooled(width, CLASSES, asked["pool"], weights, label_smoothing=asked.get("label_smoothing", 0.0))
        case "steps":
            head = StepNumbers(width, NUMBERS, "nse")
        case "transcription":
            head = Ctc(width, CLASSES, upsample=asked["upsample"])
        case "regression":
            head = PooledNumbers(width, NUMBERS, asked["pool"])
        case _:
            quantiles, past = (0.1, 0.5, 0.9) if asked["quantiles"] else None, asked.get("past", 0)
            if asked.get("distribution"):
                how = {"linear": past > 1, "scaled": past > 1, "past_steps": past}
                head = DistributionForecast(width, HORIZON, NUMBERS, asked["distribution"], **how)
            else:
                head = Forecast(width, HORIZON, NUMBERS, quantiles, linear=past > 0, scaled=past > 1, past_steps=past)
    model = Model(
        encoder,
        lstm,
        head,
        dropout_in=Dropout(asked["dropout_in"], locked=asked["locked"], name="dropout_in"),
        dropout_out=Dropout(asked["dropout_out"], locked=asked["locked"], name="dropout_out"),
    )
    initialize(model, case["seed"])
    if asked["learned_carry"]:
        # They start at zero, where a lane that is not reset could not be told from one that is.
        generator = torch.Generator().manual_seed(case["seed"] + 1)
        with torch.no_grad():
            for name, parameter in model.lstm.named_parameters():
                if name.startswith("carry"):
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def batches_of(case: Case) -> list[list[Batch]]:
    """For each optimizer step, its batches."""
    generator = torch.Generator().manual_seed(case["seed"])
    groups, place = [], 0
    for group in case["groups"]:
        made = []
        for asked in group:
            made.append(_batch(case, asked, place, generator))
            place += 1
        groups.append(made)
    return groups


def _batch(case: Case, asked: dict[str, Any], place: int, generator: torch.Generator) -> Batch:
    steps, lanes, task, model = asked["steps"], len(asked["lengths"]), case["task"], case["model"]
    lengths_B = torch.tensor(asked["lengths"])
    padded_TB = torch.arange(steps)[:, None] >= lengths_B
    odd = case.get("padding", "plain") == "odd"  # whatever stands in padding must change nothing
    inputs: Tensor
    if model["numbers"]:
        inputs = torch.randn((steps, lanes, FEATURES), generator=generator, dtype=torch.float64)
        inputs[padded_TB] = math.nan if odd else 0.0
    else:
        inputs = torch.randint(VOCABULARY, (steps, lanes), generator=generator)
        inputs[padded_TB] = VOCABULARY - 1 if odd else 0
        if model.get("characters"):
            codes = torch.randint(2, CHARACTERS, (steps, lanes, LETTERS), generator=generator)
            lengths_TB1 = torch.randint(LETTERS + 1, (steps, lanes, 1), generator=generator)  # some words have no characters
            codes[torch.arange(LETTERS) >= lengths_TB1] = 0
            codes[padded_TB] = CHARACTERS - 1 if odd else 0
            inputs = torch.cat([inputs[..., None], codes], dim=-1)
    share = case.get("resets")  # of the steps at which a lane starts again
    resets = None if share is None else torch.rand((steps, lanes), generator=generator) < share
    by_lane = task in POOLED and resets is None
    lead = (lanes,) if by_lane else (steps, lanes)
    counts = model.get("distribution") in COUNTS
    unused = lengths_B == 0 if by_lane else padded_TB
    if task in POOLED and resets is not None:  # of every sequence, the last step has the target
        ends_TB = torch.arange(steps)[:, None] == lengths_B - 1
        ends_TB[:-1] |= resets[1:] & ~padded_TB[1:]
        unused = ~ends_TB
    if task in ("regression", "forecasting"):
        shape = (*lead, NUMBERS) if task == "regression" else (*lead, HORIZON, NUMBERS)
        targets = torch.randn(shape, generator=generator, dtype=torch.float64)
        targets = targets.abs().mul(3).floor() if counts else targets
        targets[unused] = math.nan if odd else 7.0
        for lane, factor in asked.get("target_factors", {}).items():
            targets[int(lane)] *= factor  # of a pooled task
    elif task == "steps":
        targets = torch.randn((*lead, NUMBERS, 2), generator=generator, dtype=torch.float64)
        targets[..., 1].abs_()  # the weight of each
        missing = torch.rand((*lead, NUMBERS), generator=generator) < 0.3
        targets[..., 0][missing] = math.nan
        targets[unused] = math.nan if odd else 7.0
    elif task == "transcription":  # as many labels as fit, even if all are equal
        most_B = (-(-lengths_B // math.prod(stride for _, _, stride in model.get("front") or [])) * model["upsample"] + 1) // 2
        targets = torch.randint(CLASSES, (lanes, max(1, int(most_B.max()))), generator=generator)
        count_B = (torch.rand(lanes, generator=generator) * (most_B + 1)).long()
        targets[torch.arange(targets.shape[1]) >= count_B[:, None]] = -1
        targets[unused] = 1 if odd else 0
    elif model.get("multi_label"):
        drawn = torch.rand((*lead, CLASSES), generator=generator, dtype=torch.float64)
        targets = torch.where(drawn < 0.2, math.nan, (drawn < 0.5).double())  # some are missing
        targets[unused] = math.nan if odd else 1.0
    else:
        targets = torch.randint(VOCABULARY if task == "language" else CLASSES, lead, generator=generator)
        if model.get("crf"):
            targets[targets == CLASSES - 1] = -100  # unknown, where it might not be allowed
        targets[unused] = 1 if odd else 0
    past = model.get("past", 0)
    history = torch.randn((steps + past - 1, lanes, NUMBERS), generator=generator, dtype=torch.float64) if past else None
    if counts and history is not None:  # with the size of a unit of each lane
        history = torch.cat([history.abs(), torch.linspace(0.5, 9.0, lanes).double()[:, None].expand(history.shape)], dim=-1)
    history = inputs[..., 1:] if model.get("word_scores") else history
    if task in POOLED and resets is not None:
        targets[unused] = math.nan if targets.is_floating_point() else -100
    weights = _weights(case["weights"], lead, task, generator) if case.get("weights") else None
    fresh, pooled, epoch = torch.tensor(asked["fresh"]), task in POOLED, case.get("epoch", 0)
    return Batch.of(
        inputs, targets, lengths_B, fresh=fresh, pooled=pooled, epoch=epoch, step=place, history=history, resets=resets, weights=weights
    )


def _weights(kind: str, lead: tuple[int, ...], task: str, generator: torch.Generator) -> Tensor:
    """Weights of targets, some of them 0: one for each `lane`, `step` or number `ahead` where the task has such."""
    shape = (*lead, HORIZON) if kind == "ahead" and task == "forecasting" else lead[-1:] if kind == "lane" and task not in POOLED else lead
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.where(drawn < 0.2, 0.0, 3.0 * drawn)


def train(case: Case, mesh: Mesh) -> Run:
    """Train on the case's batches at this worker's place in the mesh. Every worker must call it."""
    trainer = Trainer(model_of(case), case["train"], mesh=mesh, keep_state=case["task"] in STREAMS)
    if "schedule" in case:
        trainer.compute.scheduler = SCHEDULERS[case["schedule"]]
    if not case.get("recorded", True):
        trainer.capture = None
    if case.get("disturbed"):
        _disturb(trainer)
    run = Run([], [], [], None, {})
    for number, group in enumerate(batches_of(case)):
        result = trainer.update(*group)
        run.losses.append(float(result.loss_sum / result.count.clamp(min=1e-30)))
        run.norms.append(float(result.norm))
        run.finite.append(bool(result.finite))
        if number == 0:
            assert (held := _held(trainer)) == [], f"the step has ended, but something keeps its autograd graph, which leads to {held}"
            run.gradients = _gathered(trainer)
    if mesh.links is not None:
        mesh.links.drain()
    run.weights = {name: tensor.clone() for name, tensor in trainer.gathered().items()}
    if trainer.capture is not None:
        run.replays, run.failure = trainer.capture.replays["step"], trainer.capture.failure("step")
    run.scale = None if trainer.scaler is None else float(trainer.scaler.scale)
    held = trainer.parameters() | optimizers.state_tensors(trainer.optimizer, trainer.named)
    run.digests = {name: hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest() for name, tensor in held.items()}
    return run


def _disturb(trainer: Trainer) -> None:
    """Change each weight by its last bit, up or down, or not at all."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in trainer.named:
            steps = torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter)
            parameter.mul_(1.0 + torch.finfo(parameter.dtype).eps * steps)


def _held(trainer: Trainer) -> list[str]:
    """The weights that a living autograd graph leads to. Nodes are marked, and looked up again: a new one has no mark."""
    trained = {name: p for name, p in trainer.named if p.requires_grad}
    for parameter in trained.values():
        get_gradient_edge(parameter).node.metadata["marked"] = True
    return [name for name, parameter in trained.items() if "marked" in get_gradient_edge(parameter).node.metadata]


def _gathered(trainer: Trainer) -> dict[str, Tensor]:
    """The gradients of the whole model, by name, on rank 0. One that is not there is zero."""
    own = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trainer.named}
    parts = collect(trainer.mesh.world, own if trainer.mesh.replica == 0 else {})
    return {name: tensor.cpu() for part in reversed(parts) for name, tensor in part.items()}


def serial(case: Case, device: str = "cpu") -> Run:
    """The answer: the case on one device, whatever its plan says."""
    return train(case, Mesh.alone(torch.device(device), Plan.serial()))


def errors(got: Run, wanted: Run, *, floor: float, adam: float = 0.0) -> dict[str, float]:
    """‖a − b‖ / ‖b‖ of the losses, the norms, every gradient and every weight; infinite where one is missing or no number.

    `floor` is the least that is divided by. What is left of a tensor whose terms cancel is no measure of their rounding. `adam` is the
    learning rate, if Adam trains: it divides a gradient by its own size and adds an eps of 1e-8, so a gradient that is nothing but
    rounding moves its weight all the same. Such weights may differ by what Adam makes of their gradients.
    """
    found: dict[str, float] = {}
    for kind, ours, theirs in (("gradient", got.gradients, wanted.gradients), ("weight", got.weights, wanted.weights)):
        for name in ours.keys() | theirs.keys():
            pair = ours.get(name), theirs.get(name)
            spared = _moved_by_rounding(got, wanted, name, adam) if kind == "weight" and adam else 0.0
            found[f"{kind} {name}"] = math.inf if pair[0] is None or pair[1] is None else _error(pair[0], pair[1], floor, spared)
    for step, (loss, norm, *both) in enumerate(zip(got.losses, got.norms, wanted.losses, wanted.norms, strict=True)):
        for kind, a, b in (("loss", loss, both[0]), ("norm", norm, both[1])):
            found[f"{kind} of step {step}"] = _error(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), floor)
    return found


def _moved_by_rounding(got: Run, wanted: Run, name: str, rate: float) -> Tensor | float:
    """How far Adam moves each element of a weight whose gradient is nothing but rounding."""
    sizes = [run.gradients[name].abs() for run in (got, wanted) if name in run.gradients]
    both = sum(sizes, torch.zeros(()))
    return torch.where(both < 1e-14, len(wanted.losses) * rate * both / 1e-8, 0.0)


def _error(a: Tensor, b: Tensor, floor: float, spared: Tensor | float = 0.0) -> float:
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    if a.shape != b.shape:
        return math.inf
    error = float(((a - b).abs() - spared).clamp(min=0.0).norm()) / max(float(b.norm()), floor)
    return error if math.isfinite(error) else math.inf


def changed(case: Case, **fields: Any) -> Case:
    """The case with other fields; those of its sections by `section__field`."""
    other = copy.deepcopy(case)
    for name, value in fields.items():
        section, _, key = name.partition("__")
        if key:
            other[section][key] = value
        else:
            other[name] = value
    return other
