"""One trial of a user's own modules: those that give another answer when a plan cuts the batch are refused, all others pass untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, weight_norm

import carrywave as cw
from carrywave.errors import PlanError, UserError
from carrywave.model.heads.classes import Softmax

STEPS, LANES, WIDTH, CLASSES = 24, 4, 6, 3
CHUNKS, GROUPS, AGAIN, SERIAL = {"chunk_steps": 10}, {"micro_batches": 2}, {"recompute": True}, {}


class Lag(nn.Module):
    """Adds what came some steps before."""

    def __init__(self, back: int) -> None:
        super().__init__()
        self.back, self.out = back, nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        before = functional.pad(x, (0, 0, 0, 0, self.back, 0))[: len(x)]
        out: Tensor = self.out(torch.cat([x, x - before], -1))
        return out


class OfInput(nn.Module):
    """A linear layer behind any function of the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.out, self.calls = function, nn.Linear(1, WIDTH), 0
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(float(x.detach().sum()))
        out: Tensor = self.out(self.function(self, x))
        return out


class Eights(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 8:
            raise ValueError("needs a multiple of 8 steps")
        return super().forward(x)


class Positions(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.arange(len(x))[:, None, None])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(x)[0]
        return out


class BatchMean(nn.Module):
    """Statistics of the first batch that it sees, for all that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None
        self.out = nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean() if self.mean is None else self.mean
        out: Tensor = self.out(x - self.mean)
        return out


class Clipped(nn.Linear):
    """Gradients that are cut off, which a sum over pieces is not."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 0.1 / gradient.norm())
        return out


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return total, (target != -100).sum()


class Pairs(Head):
    """Compares the first half of the lanes with the second."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.out(y).chunk(2, 1)
        return (first - second).square().sum(), torch.tensor(target.numel())


class Penalised(Head):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(y, target)
        return total + 0.1 * self.out.weight.square().sum(), count


class Mean(Head):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(y, target)
        return total / count, torch.ones(())


class Largest(Head):
    """Pools; `forgets` what earlier chunks have left."""

    pooled = True

    def __init__(self, *, forgets: bool = False) -> None:
        super().__init__()
        self.forgets = forgets

    def start(self, lanes: int, dtype: torch.dtype | None = None, device: Any = None) -> tuple[Tensor, ...]:
        return (torch.full((lanes, WIDTH), -1.0, dtype=dtype, device=device),)

    def pool(self, y: Tensor, lengths: Tensor, acc: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        real = torch.arange(len(y))[:, None, None] < lengths[:, None]
        seen = torch.where(real, y, -1.0).amax(0)
        return (seen if self.forgets else torch.maximum(acc[0], seen),)

    def loss(self, acc: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(self.out(acc[0]), target, reduction="sum"), torch.tensor(target.numel())


class Remembers(Head):
    """Keeps its last result, as to be looked at; computes in float32."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        self.last = self.out(y)
        total = functional.cross_entropy(self.last.flatten(0, 1).float(), target.flatten(), reduction="sum")
        return total, target.numel()  # type: ignore[return-value]


class PerFrame(nn.Module):
    """A convolution within each step, dropout, and a bias before a norm, whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out, self.drop = nn.Conv1d(1, 3, 1), nn.Linear(3, WIDTH), nn.Dropout(0.5)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.conv(x.flatten(0, 1)[:, :, None])[..., 0].unflatten(0, x.shape[:2])
        out: Tensor = self.drop(self.norm(self.out(seen)))
        return out


class SinglePrecision(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return super().forward(x)


def drawing(self: Any, x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def shifted(self: Any, x: Tensor) -> Tensor:
    x += 1  # in place
    return x


def plain() -> nn.Module:
    return nn.Linear(1, WIDTH)


def batch(steps: int = STEPS, lanes: int = LANES, *, pooled: bool = False, **more: Any) -> cw.Batch:
    draw = torch.Generator().manual_seed(steps)
    x = torch.randn(steps, lanes, 1, generator=draw)
    return cw.Batch.of(x, torch.randint(CLASSES, (lanes,) if pooled else (steps, lanes), generator=draw), pooled=pooled, **more)


def trainer_of(encoder: nn.Module, head: nn.Module, plan: dict[str, Any], **keys: Any) -> cw.Trainer:
    torch.manual_seed(0)
    model = cw.Model(encoder, cw.LSTM(WIDTH, WIDTH, num_layers=2), head)
    return cw.Trainer(model, {"optimizer": "sgd", "lr": 0.1} | keys, plan=plan, keep_state=False)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], dict[str, Any], str]] = {
    "looks back one step": (
        lambda: Lag(1),
        Head,
        CHUNKS,
        r"encoder \(Lag\) or head \(Head\) gives .*% off on 10 of 24 steps alone; .*chunk_steps",
    ),
    "looks back further than a chunk": (lambda: Lag(11), Head, CHUNKS, "10 of 24 steps"),
    "needs a multiple of 8 steps": (
        lambda: Eights(1, WIDTH),
        Head,
        CHUNKS,
        "takes the whole batch but not 10 of 24 steps: needs a multiple of 8 steps",
    ),
    "positions": (lambda: Positions(1, WIDTH), Head, CHUNKS, "make it work step by step"),
    "recurrent": (Recurrent, Head, CHUNKS, r"encoder \(Recurrent\)"),
    "centres lanes": (
        lambda: OfInput(lambda self, x: x - x.mean(1, keepdim=True)),
        Head,
        GROUPS,
        "1 of 2 groups of lanes alone; make it work lane by lane",
    ),
    "statistics of the first batch": (BatchMean, Head, GROUPS, "groups of lanes"),
    "counts its calls": (lambda: OfInput(lambda self, x: x / self.calls), Head, GROUPS, "groups of lanes"),
    "counts its calls, computed again": (lambda: OfInput(lambda self, x: x / self.calls), Head, AGAIN, "a second run alone; .*recompute"),
    "draws numbers of its own": (lambda: OfInput(drawing), Head, CHUNKS, "10 of 24 steps"),
    "draws, computed again": (lambda: OfInput(drawing), Head, AGAIN, "a second run"),
    "changes its input, computed again": (lambda: OfInput(shifted), Head, AGAIN, "a second run"),
    "clips gradients": (lambda: Clipped(1, WIDTH), Head, GROUPS, r"a gradient of encoder\.\w+ that is .*% off"),
    "pairs lanes": (plain, Pairs, GROUPS, r"^head \(Pairs\) gives a loss that is .*% off on 1 of 2 groups of lanes"),
    "a penalty in the loss": (plain, Penalised, CHUNKS, r"head \(Penalised\) gives a loss"),
    "a mean for a sum": (plain, Mean, CHUNKS, r"head \(Mean\) gives 3 targets instead of 1"),
    "forgets what it has pooled": (plain, lambda: Largest(forgets=True), CHUNKS, r"head \(Largest\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_gives_another_answer_in_pieces_is_refused(name: str) -> None:
    encoder, head, plan, words = REFUSED[name]
    made = head()
    with pytest.raises(PlanError, match=words) as caught:
        trainer_of(encoder(), made, plan).step(batch(pooled=isinstance(made, Largest)))
    assert "\n" not in str(caught.value)
    trainer_of(encoder(), head(), SERIAL).step(batch(pooled=isinstance(made, Largest)))  # one device cuts nothing


PASSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "per step": (lambda: nn.Sequential(plain(), nn.GELU(), nn.LayerNorm(WIDTH)), Head),
    "within each step": (PerFrame, Head),
    "a log and the last result": (lambda: OfInput(lambda self, x: x), Remembers),
    "pools": (plain, Largest),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(1, WIDTH)), Head),
    "weights that a hook computes": (lambda: weight_norm(nn.Linear(1, WIDTH)), Head),
    "TorchScript": (lambda: torch.jit.script(nn.Sequential(plain(), nn.Tanh())), Head),
    "compiled": (lambda: torch.compile(plain(), backend="eager"), Head),
    "float32 only": (lambda: SinglePrecision(1, WIDTH), Head),
}


@pytest.mark.parametrize("plan", [CHUNKS, GROUPS, CHUNKS | GROUPS | AGAIN])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_gives_the_same_answer_passes(name: str, plan: dict[str, Any]) -> None:
    encoder, head = (make() for make in PASSES[name])
    trainer = trainer_of(encoder, head, plan)
    trainer.step(batch(pooled=isinstance(head, Largest)))
    trainer.evaluate([batch(pooled=isinstance(head, Largest))])


def test_a_trial_leaves_model_and_generators_as_they_were() -> None:
    encoder = OfInput(lambda self, x: x + 0 * torch.rand_like(x))
    trainer = trainer_of(encoder, Head(), CHUNKS)
    before, generator = copy.deepcopy(encoder.state_dict()), torch.get_rng_state()
    trainer._trial.before([batch()], [torch.zeros(2, dtype=torch.int32)], training=True)
    assert (encoder.calls, encoder.log) == (0, [])
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in encoder.parameters())
    torch.testing.assert_close(encoder.state_dict(), before, rtol=0, atol=0)


def test_more_pieces_than_before_are_tried_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first batch of one step says nothing about those that follow; an evaluation has batches of its own."""
    trainer = trainer_of(Lag(4), Head(), CHUNKS)
    trainer.step(batch(1))
    with pytest.raises(PlanError, match="10 of 24 steps"):
        trainer.step(batch())
    trainer = trainer_of(Lag(4), Head(), CHUNKS)
    trainer.step(batch(10))
    with pytest.raises(PlanError, match="10 of 24 steps"):
        trainer.evaluate([batch()])
    trainer = trainer_of(PerFrame(), Head(), CHUNKS)
    trainer.step(batch())
    monkeypatch.setattr("carrywave.step.checks.trial.twin", None)
    trainer.step(batch(20))


def test_our_modules_and_those_of_a_promise_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrywave.step.checks.trial.twin", None)
    encoder, head = Lag(4), Head()
    encoder.splittable = head.splittable = True  # type: ignore[assignment]
    trainer_of(encoder, head, CHUNKS).step(batch())
    trainer_of(plain(), Softmax(WIDTH, CLASSES), CHUNKS | GROUPS).step(batch())


def test_a_module_in_one_piece_is_cut_along_lanes() -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean())

    def loss(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum"), torch.tensor(target.numel())

    cw.Trainer(nn.Linear(1, CLASSES), {"lr": 0.1}, plan=GROUPS, loss=loss).step(batch())
    with pytest.raises(PlanError, match=r"^module \(Centred\) gives a loss that is .*% off on 1 of 2 groups"):
        cw.Trainer(Centred(1, CLASSES), {"lr": 0.1}, plan=GROUPS, loss=loss).step(batch())


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(UserError, match="encoder is an Embedding with sparse=True"):
        trainer_of(nn.Embedding(4, WIDTH, sparse=True), Head(), SERIAL)
