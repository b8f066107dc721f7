"""Modules as users write them that would give another result when split, each for a reason of its own: they are refused."""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations as torch_parametrizations
from torch.nn.utils import parametrize, spectral_norm, weight_norm

import carrywave as cw
from carrywave.errors import PlanError, UserError
from carrywave.step.checks.own_modules.module_changes import ModuleChanges
from carrywave.step.checks.own_modules.shared_objects import changed_by, hidden_reference, shared_objects

pytestmark = pytest.mark.filterwarnings("ignore:.*this plan does not change the result")
STEPS, LANES, FEATURES, WIDTH, CLASSES = 8, 8, 4, 6, 3
MICRO, CHUNKS, RECOMPUTE = {"micro_batches": 2}, {"chunk_steps": 4}, {"recompute": True}


def batches(count: int, lanes: tuple[int, ...] = (LANES,)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    sizes = [lanes[number % len(lanes)] for number in range(count)]
    return [
        (torch.randn(STEPS, size, FEATURES, generator=generator).double(), torch.randint(CLASSES, (STEPS, size), generator=generator))
        for size in sizes
    ]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), reduction="sum")
        return total, (target != -100).sum()


def train(
    encoder: Callable[[], nn.Module],
    head: Callable[[], nn.Module],
    plan: dict[str, Any],
    data: list[tuple[Tensor, Tensor]],
    before: Callable[[Any, int], None],
) -> list[float]:
    torch.manual_seed(0)
    model = cw.Model(encoder(), cw.LSTM(FEATURES, WIDTH), head()).double()
    trainer = cw.Trainer(model, {"optimizer": "sgd", "lr": 0.3, "precision": "fp64"}, plan=plan, device="cpu", keep_state=False)
    losses = []
    for number, (x, target) in enumerate(data):
        before(model, number)
        losses.append(float(trainer.step(cw.Batch.of(x.clone(), target.clone()))))
    return losses


def never(model: Any, number: int) -> None:
    pass


def one_answer(
    encoder: Callable[[], nn.Module] = nn.Tanh,
    head: Callable[[], nn.Module] = Head,
    plan: dict[str, Any] = MICRO,
    data: list[tuple[Tensor, Tensor]] | None = None,
    before: Callable[[Any, int], None] = never,
    close: float = 1e-9,
) -> int:
    """Check that the plan gives what one device gives as long as it goes; returns the number of steps before it is refused."""
    data = data or batches(7)
    alone = train(encoder, head, {}, data, before)
    losses: list[float] = []

    def recorded(model: Any, number: int) -> None:
        losses.append(0.0)
        before(model, number)

    try:
        assert train(encoder, head, plan, data, recorded) == pytest.approx(alone, rel=close)
    except PlanError:
        return len(losses) - 1
    return len(losses)


class FirstMean(nn.Module):
    """Takes its statistics from the first batch that it sees."""

    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean((0, 1))
        return x - self.mean


class Imputed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        missing = x < -1.5
        x[missing] = x[~missing].mean()
        return x


class AtLeastOne(Head):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(y, target)
        return total, count.clamp(min=1)


class WithGradients(Head):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(y, target)
        return (2 * total if torch.is_grad_enabled() else total), count


class Neighbours(Head):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(y, target)
        pairs = y.shape[1] // 2
        return total + 0.1 * (y[:, 0 : 2 * pairs : 2] - y[:, 1 : 2 * pairs : 2]).square().sum(), count


class Uneven(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rest = x[..., 1:]
        return torch.cat([x[..., :1] * 1e5, rest - 0.3 * rest.mean(1, keepdim=True)], -1)


class ClippedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * min(1.0, 200.0 / float(gradient.norm())))
        return out


class CountsInClass(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x - x.mean(1, keepdim=True) if self.calls > 1000 else x


class OwnRandom(nn.Module):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.source = draw()

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 if self.source.random() < 0.01 else 1.0)


@pytest.mark.parametrize(
    "case",
    [
        {"encoder": FirstMean},
        {"encoder": FirstMean, "plan": CHUNKS},
        {"encoder": Imputed},
        {"head": AtLeastOne},
        {"head": WithGradients, "plan": RECOMPUTE},
        {"encoder": Uneven},
        {"encoder": ClippedOutput},
        {"encoder": CountsInClass},
        {"encoder": lambda: OwnRandom(lambda: random.Random(3))},
        {"encoder": lambda: OwnRandom(lambda: np.random.default_rng(3))},
    ],
    ids=["first", "first, chunks", "imputed", "clamp", "recompute", "uneven", "clipped", "class", "random", "numpy"],
)
def test_what_is_wrong_from_the_beginning_is_refused_at_once(case: dict[str, Any]) -> None:
    assert one_answer(**case) == 0


def test_a_pair_of_neighbours_is_noticed_at_a_size_between_others() -> None:
    assert one_answer(head=Neighbours, data=batches(7, (4, 8, 6))) == 2


class Hard(Head):
    """Takes the hardest examples as soon as the batch is easy."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        each = functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), reduction="none")
        if each.detach().mean() < 0.9:
            each = each.topk(each.numel() // 4)[0] * 4
        return each.sum(), torch.tensor(target.numel())


def test_a_head_is_compared_on_what_it_really_reads() -> None:
    x, _ = batches(1)[0]
    learnable = [(x, (x[..., 0] > 0).long())] * 40
    assert 1 < one_answer(head=Hard, data=learnable) < 40


@dataclass(slots=True)
class Slotted:
    share: float = 0.0


class Schedule:
    share = 0.0

    def value(self) -> float:
        return self.share

    def __call__(self) -> float:
        return self.share


class Mix(nn.Module):
    """Mixes lanes by a share that it reads in some way."""

    def __init__(self, share: Callable[[Any], Any], **attributes: Any) -> None:
        super().__init__()
        self.share = share
        for name, value in attributes.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x + float(self.share(self)) * x.mean(1, keepdim=True)


class Config:
    share = 0.0


@pytest.mark.parametrize(
    ("encoder", "change"),
    [
        (lambda: Mix(lambda m: m.a, a=nn.Parameter(torch.zeros(()), requires_grad=False)), lambda m: m.a.data.fill_(1.0)),
        (lambda: Mix(lambda m: m.a, a=torch.zeros(())), lambda m: m.a.data.fill_(1.0)),
        (lambda: Mix(lambda m: m.a, a=np.float32(0)), lambda m: setattr(m, "a", np.float32(1))),
        (lambda: Mix(lambda m: m.a[0], a=np.zeros(1)), lambda m: m.a.fill(1)),
        (lambda: Mix(lambda m: m.a.share, a=Slotted()), lambda m: setattr(m.a, "share", 1.0)),
        (lambda: Mix(lambda m: m.a[0][0][0].share, a=[[[Schedule()]]]), lambda m: setattr(m.a[0][0][0], "share", 1.0)),
        (lambda: Mix(lambda m: m.a(), a=Schedule().value), lambda m: setattr(m.a.__self__, "share", 1.0)),
        (
            lambda: Mix((lambda schedule: lambda m: schedule())(Schedule())),
            lambda m: setattr(m.share.__closure__[0].cell_contents, "share", 1.0),
        ),
        (lambda: Mix(lambda m: m.a(), a=partial(float, 0.0)), lambda m: setattr(m, "a", partial(float, 1.0))),
        (lambda: Mix(lambda m: Config.share), lambda m: setattr(Config, "share", 1.0)),
        (lambda: Mix(lambda m: next(Config.share for _ in "1")), lambda m: setattr(Config, "share", 1.0)),
    ],
    ids=["frozen", "data", "numpy", "array", "slots", "deep", "method", "closure", "partial", "class", "inner"],
)
def test_a_change_is_noticed_wherever_it_is(
    encoder: Callable[[], Mix], change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "share", 0.0)
    made = encoder()
    changes = ModuleChanges([made])
    changes.settle()
    assert not changes.due()
    change(made)
    assert changes.due()
    changes.settle()
    assert not changes.due()


def test_one_change_beside_a_counter_is_noticed() -> None:
    made = Mix(lambda m: m.keep, number=0, keep=1.0)
    changes = ModuleChanges([made])
    changes.settle()
    for number in range(1, 30):
        made.number = number
        changes.due()
        changes.settle()
    made.number = 30
    assert not changes.due()
    made.number, made.keep = 31, 0.5
    assert changes.due()


def test_functions_made_anew_are_told_apart_by_what_they_hold() -> None:
    made = Mix(lambda m, a=0.0: a)
    changes = ModuleChanges([made])
    changes.settle()
    for _ in range(3):
        made.share = lambda m, a=0.0: a
        changes.due()
        changes.settle()
    made.share = lambda m, a=1.0: a
    assert changes.due()


def test_the_loss_of_a_module_in_one_piece_is_looked_at_too() -> None:
    class Loss(nn.Module):
        share = 0.0

    loss = Loss()
    changes = ModuleChanges([nn.Linear(1, 1)], [loss])
    changes.settle()
    loss.share = 1.0
    assert changes.due()


class Noting(nn.Module):
    def __init__(self, notes: dict[str, Any]) -> None:
        super().__init__()
        self.linear, self.notes = nn.Linear(FEATURES, FEATURES), notes

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.notes["sum"] = float(out.detach().sum())
        return out


class Reads(Head):
    def __init__(self, reads: Any) -> None:
        super().__init__()
        self.reads = reads


def test_what_encoder_and_head_share_in_secret() -> None:
    notes: dict[str, Any] = {}
    encoder, lstm = Noting(notes), cw.LSTM(FEATURES, WIDTH)

    def hidden(head: nn.Module) -> str:
        return str(hidden_reference({"encoder": encoder, "lstm": lstm, "head": head}))

    assert hidden(Reads(notes)) == "None"
    [shared] = [each for each in shared_objects(encoder, Reads([notes])) if isinstance(each, dict)]
    assert shared is notes
    assert changed_by(lambda: encoder(torch.zeros(1, 1, FEATURES)), [notes]) == "dict"
    assert changed_by(lambda: encoder.linear(torch.zeros(1, 1, FEATURES)), [notes]) is None
    assert hidden(Reads([encoder])).startswith("head (Reads) reaches encoder through a reference that is not a module's attribute")
    assert "head (Reads) reaches encoder through" in hidden(Reads(lambda: encoder.linear))
    assert "head (Reads) reaches encoder.linear.weight through" in hidden(Reads([encoder.linear.weight]))
    assert "head (Reads) reaches lstm through" in hidden(Reads({"layers": lstm}))
    assert "head (Reads) reaches lstm.weight_hh_l0 through" in hidden(Reads((lstm.weight_hh_l0,)))
    tied = Reads(None)
    tied.reads = encoder.linear  # an attribute: the model knows it
    assert hidden(tied) == "None"


def test_a_part_that_is_replaced_or_a_forward_that_would_be_ignored_is_refused() -> None:
    model = cw.Model(nn.Tanh(), cw.LSTM(FEATURES, WIDTH), Head())
    trainer = cw.Trainer(model, {"lr": 0.1}, device="cpu")
    batch = cw.Batch.of(*[each.float() if each.is_floating_point() else each for each in batches(1)[0]])
    trainer.step(batch)
    model.head = Head()
    with pytest.raises(UserError, match=r"model\.head was replaced after the trainer was created"):
        trainer.step(batch)

    class Changed(cw.Model):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    class ChangedLSTM(cw.LSTM):
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    with pytest.raises(UserError, match="the forward of Changed would be ignored"):
        cw.Trainer(Changed(nn.Tanh(), cw.LSTM(FEATURES, WIDTH), Head()), {"lr": 0.1}, device="cpu")
    with pytest.raises(UserError, match="the forward of ChangedLSTM would be ignored"):
        cw.Trainer(cw.Model(nn.Tanh(), ChangedLSTM(FEATURES, WIDTH), Head()), {"lr": 0.1}, device="cpu")


class Policy(Head):
    """A loss whose terms nearly cancel, in float32."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        chosen = functional.log_softmax(self.out(y).float(), -1).gather(-1, target[..., None])[..., 0]
        return (chosen * (target.float() - 1)).sum(), torch.tensor(target.numel())


def test_a_sum_that_cancels_is_no_difference() -> None:
    assert one_answer(head=Policy, close=1e-5) == 7


class Plain(NamedTuple):
    h: Tensor


def normed(gates: Tensor, carry: Any, weights: Any) -> tuple[Tensor, ...]:
    """A recurrent batch norm."""
    h = (gates + weights.recurrent(carry.h)).tanh()
    return ((h - h.mean(0)) / (h.std(0) + 0.1),)


def zoned(gates: Tensor, carry: Any, weights: Any) -> tuple[Tensor, ...]:
    """Zoneout from a generator that is not keyed."""
    new = (gates + weights.recurrent(carry.h)).tanh()
    return (torch.where(torch.rand_like(new) < 0.2, carry.h, new),)


def tanh(gates: Tensor, carry: Any, weights: Any) -> tuple[Tensor, ...]:
    return ((gates + weights.recurrent(carry.h)).tanh(),)


class Noise(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.1 * torch.randn_like(weight)


def with_layers(made: nn.Module, plan: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = cw.Model(nn.Tanh(), made, Head()).double()
    trainer = cw.Trainer(model, {"optimizer": "sgd", "lr": 0.3, "precision": "fp64"}, plan=plan, device="cpu", keep_state=False)
    return [float(trainer.step(cw.Batch.of(x, target))) for x, target in batches(3)]


def of_cell(step: Callable[..., tuple[Tensor, ...]]) -> nn.Module:
    class Own(cw.Recurrent):
        cell = cw.Cell("own", gates=1, carry=Plain, step=step)

    torch.manual_seed(1)
    return Own(FEATURES, WIDTH, num_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [MICRO, CHUNKS, {**CHUNKS, **MICRO}])
def test_cells_and_parametrizations_of_the_users_own_are_compared_too(plan: dict[str, Any]) -> None:
    assert with_layers(of_cell(tanh), plan) == pytest.approx(with_layers(of_cell(tanh), {}), rel=1e-9)
    if "micro_batches" in plan:
        with pytest.raises(PlanError, match=r"lstm \(Own\) gives different results for a lane"):
            with_layers(of_cell(normed), plan)
    with pytest.raises(PlanError, match=r"lstm \(Own\) draws from a random generator that is not keyed"):
        with_layers(of_cell(zoned), plan)
    noisy = cw.LSTM(FEATURES, WIDTH)
    parametrize.register_parametrization(noisy, "weight_hh_l0", Noise())
    with pytest.raises(PlanError, match=r"lstm.* draws from a random generator that is not keyed"):
        with_layers(noisy, plan)
    for normalised in (weight_norm, torch_parametrizations.weight_norm):
        torch.manual_seed(1)
        made = [cw.LSTM(FEATURES, WIDTH) for _ in range(2)]
        made[1].load_state_dict(made[0].state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            one, several = (normalised(each, "weight_hh_l0") for each in made)
        assert with_layers(several, plan) == pytest.approx(with_layers(one, {}), rel=1e-9)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
def test_a_norm_that_would_not_be_computed_is_refused() -> None:
    with pytest.raises(UserError, match=r"use torch\.nn\.utils\.parametrizations\.spectral_norm"):
        with_layers(spectral_norm(cw.LSTM(FEATURES, WIDTH), "weight_hh_l0"), {})


class Experts(nn.Module):
    """Leaves a figure for the head: a mean, or a sum."""

    def __init__(self, *, mean: bool) -> None:
        super().__init__()
        self.mean, self.gate = mean, nn.Linear(FEATURES, FEATURES)
        self.left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gate(x)
        self.left = out.square().mean((0, 1)).square().sum() if self.mean else out.square().sum()
        return out


class Balanced(Head):
    def __init__(self, encoder: Experts) -> None:
        super().__init__()
        self.encoder = [encoder]

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(y, target)
        left = self.encoder[0].left
        assert left is not None
        return total + 0.1 * left * (target.numel() if self.encoder[0].mean else 1), count


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("plan", [MICRO, CHUNKS])
def test_a_head_that_reads_what_the_encoder_left_is_tried_after_it(plan: dict[str, Any], mean: bool) -> None:
    made: list[Experts] = []

    def encoder() -> nn.Module:
        made.append(Experts(mean=mean))
        return made[-1]

    assert one_answer(encoder, lambda: Balanced(made[-1]), plan) == (0 if mean else 7)


class Shared(nn.Module):
    """Takes its scale from the first call, into a dict of the class."""

    kept: ClassVar[dict[str, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x / self.kept.setdefault("scale", x.detach().std((0, 1))))  # type: ignore[no-any-return]


class Slots:
    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = torch.zeros(CLASSES).double()


class Running(Head):
    """Keeps a running mean, in an array and behind slots."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.slots = np.zeros(CLASSES), Slots()

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        out = self.out(y)
        centre = torch.as_tensor(self.array.copy()) + self.slots.mean
        self.array *= 0.9
        self.array += 0.1 * out.detach().double().mean((0, 1)).numpy()
        self.slots.mean = self.slots.mean * 0.9 + 0.1 * out.detach().double().mean((0, 1))
        return (out - centre).square().sum(), torch.tensor(target.numel())


def test_state_in_odd_places_is_refused_when_split_and_untouched_by_the_trial_on_one_device() -> None:
    Shared.kept.clear()
    with pytest.raises(PlanError, match="gives different results"):
        train(Shared, Head, MICRO, batches(2), never)
    Shared.kept.clear()
    (x, target), *_ = data = batches(2)
    train(Shared, Head, {}, data, never)
    assert torch.equal(Shared.kept["scale"], x.std((0, 1)))
    Shared.kept.clear()
    made: list[Running] = []

    def head() -> nn.Module:
        made.append(Running())
        return made[-1]

    losses = train(nn.Tanh, head, {}, data, never)
    torch.manual_seed(0)
    model = cw.Model(nn.Tanh(), cw.LSTM(FEATURES, WIDTH), Running()).double()
    y, _ = model(x)
    assert losses[0] == pytest.approx(float(model.head.loss(y.detach(), target)[0].detach()) / target.numel(), rel=1e-9)
    with pytest.raises(PlanError, match=r"changes its (array|slots) in forward"):
        train(nn.Tanh, Running, MICRO, data, never)


class Called:
    times = 0

    def __call__(self) -> None:
        self.times += 1


class Notes(nn.Module):
    """Writes into objects of several kinds, whichever is asked for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.counts, self.space, self.called = kind, defaultdict(int), SimpleNamespace(inner=[0]), Called()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counts":
            self.counts["calls"] += 1
        elif self.kind == "space":
            self.space.inner = [self.space.inner[0] + 1]
        elif self.kind == "called":
            self.called()
        return x


@pytest.mark.parametrize("kind", ["counts", "space", "called"])
def test_a_trial_finds_and_restores_what_is_written_into_objects_of_any_kind(kind: str) -> None:
    made = Notes(kind)
    with pytest.raises(PlanError, match=f"changes its {kind} in forward"):
        train(lambda: made, Head, MICRO, batches(1), never)
    assert (made.counts, made.space.inner, made.called.times) == ({}, [0], 0)


POND: list[Tensor] = []


def ponders(gates: Tensor, carry: Any, weights: Any) -> tuple[Tensor, ...]:
    h = (gates + weights.recurrent(carry.h)).tanh()
    POND.append(h.detach().sum())
    return (h,)


@pytest.mark.parametrize("plan", [RECOMPUTE, MICRO])
def test_what_a_cell_leaves_in_a_global_is_state(plan: dict[str, Any]) -> None:
    POND.clear()
    with pytest.raises(PlanError, match=r"lstm \(Own\) changes its variable POND in forward"):
        with_layers(of_cell(ponders), plan)
    assert not POND


class Penalised(Head):
    """A gradient penalty, where there are gradients."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(y, target)
        if not y.requires_grad:
            return total, count
        (gradient,) = torch.autograd.grad(self.out(y).square().sum(), y, create_graph=True)
        return total + 0.0 * gradient.square().sum(), count


def test_a_gradient_penalty_may_look_whether_there_are_gradients() -> None:
    assert one_answer(head=Penalised, plan=RECOMPUTE) == 7


class Weighted(Head):
    """Learned weights, whose sum is the count."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        each = functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), reduction="none")
        weight = self.out(y)[..., 0].sigmoid().flatten()
        return (weight * each).sum(), weight.sum()


def test_a_count_with_a_gradient_is_refused() -> None:
    with pytest.raises(UserError, match=r"returns a number of targets that requires grad.*; detach it"):
        train(nn.Tanh, Weighted, {}, batches(1), never)


class Transcribed(nn.Module):
    """CTC, whose loss on a CPU takes a target of -100 for an address."""

    reads_whole, pooled = True, True

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 4)
        self.targets: list[int] = []

    def loss(self, y: Tensor, target: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        assert int(target.min()) >= 0
        scores = self.out(y).log_softmax(-1)
        return functional.ctc_loss(scores, target, lengths, torch.full((len(target),), 3), reduction="sum"), torch.tensor(len(target))


def test_targets_that_are_never_missing_are_not_masked_for_a_head_that_reads_whole_sequences() -> None:
    data = [(x, torch.randint(1, 4, (x.shape[1], 3), generator=torch.Generator().manual_seed(1))) for x, _ in batches(3)]
    losses = []
    for plan in ({}, MICRO):
        torch.manual_seed(0)
        model = cw.Model(nn.Tanh(), cw.LSTM(FEATURES, WIDTH), Transcribed()).double()
        trainer = cw.Trainer(model, {"optimizer": "sgd", "lr": 0.1, "precision": "fp64"}, plan=plan, device="cpu")
        losses.append([float(trainer.step(cw.Batch.of(x, target, pooled=True))) for x, target in data])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
