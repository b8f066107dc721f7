"""What a trial of a user's module must not miss, and must not leave behind: state in odd places, what is changed in place, TorchScript."""

from __future__ import annotations

import argparse
import itertools
import threading
from array import array
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, lru_cache
from traceback import extract_tb
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

import carrywave as cw
from carrywave.errors import PlanError, UserError
from carrywave.kernels import random
from carrywave.model.heads.classes import Softmax
from carrywave.model.stage import Chunk, Stage, State
from carrywave.plan.plan import Plan as ParallelPlan
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.own_modules.module_traces import Kept
from carrywave.step.worker_setup import _check_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*this plan does not change the result")
STEPS, LANES, FEATURES, CLASSES = 8, 4, 3, 5
MICRO, CHUNKS, RECOMPUTE, SERIAL = {"micro_batches": 2}, {"chunk_steps": 4}, {"recompute": True}, {}
Plan = dict[str, Any]
Make = Callable[[], nn.Module]


def batch(seed: int = 0) -> cw.Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(STEPS, LANES, FEATURES, generator=generator).double()
    return cw.Batch.of(x, torch.randint(CLASSES, (STEPS, LANES), generator=generator))


def scored(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"), (target != -100).sum()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, y: Tensor) -> Any:
        return self.out(y)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return scored(self.out(y), target)


def linear() -> nn.Module:
    return nn.Linear(FEATURES, FEATURES)


def model(encoder: Make = linear, head: Make = Head) -> cw.Model:
    torch.manual_seed(0)
    return cw.Model(encoder(), cw.LSTM(FEATURES, FEATURES), head()).double()


def train(plan: Plan, encoder: Make = linear, head: Make = Head, steps: int = 2) -> list[float]:
    made = model(encoder, head)
    trainer = cw.Trainer(made, {"optimizer": "sgd", "lr": 0.3, "precision": "fp64"}, plan=plan, device="cpu", keep_state=False)
    return [float(trainer.step(batch(seed))) for seed in range(steps)]


def plain(encoder: Make = linear, head: Make = Head, steps: int = 2) -> list[float]:
    """The losses of the same in plain PyTorch."""
    made = model(encoder, head)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.3)
    losses = []
    for seed in range(steps):
        given = batch(seed)
        total, count = cast(Any, made.head).loss(made.lstm(made.encoder(given.inputs))[0], given.targets)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses


def refused(plan: Plan, words: str, encoder: Make = linear, head: Make = Head) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        train(plan, encoder, head)
    assert "\n" not in str(caught.value)


class Settings:
    calls = 0


class Words(dict[str, int]):
    """A dict of the user's own."""


def counts(scale: Tensor, kept: dict[str, int] = {"calls": 0}) -> Tensor:  # noqa: B006 (it is what is tested)
    kept["calls"] += 1
    return scale * (1 + 0.05 * kept["calls"])


def tallies(scale: Tensor) -> Tensor:
    tallies.calls += 1  # type: ignore[attr-defined]
    return scale * (1 + 0.05 * tallies.calls)  # type: ignore[attr-defined]


tallies.calls = 0  # type: ignore[attr-defined]


@cache
def kept_for_ever() -> dict[str, int]:
    return {}


@lru_cache(maxsize=4)
def kept_for_a_while(name: str) -> list[float]:
    return [0.0]


class Helper:
    def __call__(self) -> int:
        Settings.calls += 1
        return Settings.calls


class Uses(nn.Module):
    """Multiplies by what it takes from something that changes when it does."""

    def __init__(self, held: Any, take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.held, self.take = nn.Linear(FEATURES, FEATURES), held, take

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * (1 + 0.05 * float(self.take(self.held)))


def counted(held: Any) -> int:
    held["calls"] = held.get("calls", 0) + 1
    return int(held["calls"])


def noted(held: Any) -> int:
    held.calls += 1
    return int(held.calls)


def added(held: Any) -> float:
    held[0] += 1
    return float(held[0])


def thread_local() -> threading.local:
    held = threading.local()
    held.calls = 0
    return held


def turned(held: Any) -> float:
    held.rotate()
    return float(held[0])


class Defaulted(Uses):
    def forward(self, x: Tensor, kept: list[int] = [0]) -> Tensor:  # noqa: B006 (it is what is tested)
        kept[0] += 1
        out: Tensor = self.linear(x)
        return out * (1 + 0.05 * kept[0])


RESTORABLE: dict[str, Callable[[], Uses]] = {
    "RandomState": lambda: Uses(np.random.RandomState(5), lambda held: held.rand()),
    "Generator": lambda: Uses(np.random.default_rng(5), lambda held: held.random()),
    "Namespace": lambda: Uses(argparse.Namespace(calls=0), noted),
    "SimpleNamespace": lambda: Uses(SimpleNamespace(calls=0), noted),
    "class": lambda: Uses(type("Own", (), {"calls": 0}), noted),
    "object": lambda: Uses(type("Own", (), {"calls": 0})(), noted),
    "class of an object": lambda: Uses(Helper(), lambda held: held()),
    "Counter": lambda: Uses(Counter(calls=0), counted),
    "OrderedDict": lambda: Uses(OrderedDict(calls=0), counted),
    "UserDict": lambda: Uses(UserDict(), counted),
    "own dict": lambda: Uses(Words(), counted),
    "deque": lambda: Uses(deque([1.0, 2.0, 3.0]), turned),
    "argument": lambda: Uses(torch.ones(()), counts),
    "function": lambda: Uses(torch.ones(()), tallies),
    "through a function": lambda: Uses(torch.ones(()), lambda held: tallies(held)),
    "result of a cached function": lambda: Uses(None, lambda held: counted(kept_for_ever())),
    "result of a function with a small cache": lambda: Uses(None, lambda held: added(kept_for_a_while("calls"))),
    "argument of forward": lambda: Defaulted(None, float),
    "array": lambda: Uses(array("d", [0.0]), added),
    "bytearray": lambda: Uses(bytearray(1), added),
    "local of a thread": lambda: Uses(thread_local(), noted),
    "ContextVar": lambda: Uses(ContextVar("calls", default=0), lambda held: held.set(held.get() + 1) and held.get()),
    "tensor through .data": lambda: Uses(torch.zeros(1), lambda held: held.data.add_(1)),
    "tensor through numpy": lambda: Uses(torch.zeros(1), lambda held: added(held.numpy())),
    "one of many tensors in a dict": lambda: Uses({name: torch.zeros(()) for name in range(400)}, lambda held: held[399].add_(1)),
    "one of many tensors in a list": lambda: Uses([torch.zeros(()) for _ in range(400)], lambda held: held[0].add_(1)),
}
LOST: dict[str, Callable[[], Uses]] = {
    "count": lambda: Uses(itertools.count(), next),
    "cycle": lambda: Uses(itertools.cycle([1.0, 2.0, 0.5]), next),
    "generator": lambda: Uses((0.1 * number for number in range(100)), next),
    "list_iterator": lambda: Uses(iter([0.1 * number for number in range(100)]), next),
}


def _reset() -> None:
    Settings.calls = tallies.calls = 0  # type: ignore[attr-defined]
    kept_for_ever.cache_clear()
    kept_for_a_while.cache_clear()
    counts.__defaults__[0]["calls"] = Defaulted.forward.__defaults__[0][0] = 0  # type: ignore[index]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", [*RESTORABLE, *LOST])
def test_state_in_any_place_is_refused_when_split_and_left_alone_on_one_device(kind: str) -> None:
    make = (RESTORABLE | LOST)[kind]
    _reset()
    expected = plain(make)
    _reset()
    assert train(SERIAL, make) == pytest.approx(expected, rel=1e-12)
    lost, changed = f"what it takes from the {kind} in its held cannot be put back", "changes its (held|take|class attribute|variable)"
    refused(MICRO, rf"encoder \((Uses|Defaulted)\) .*{lost if kind in LOST else changed}", make)


@cache
def ramp(steps: int) -> Tensor:
    return torch.linspace(0.0, 1.0, steps, dtype=torch.float64)


def test_a_cache_that_is_filled_is_no_state() -> None:
    """A table for each number of steps, made when it is first asked for."""
    make = lambda: Uses(None, lambda held: ramp(8).sum())  # noqa: E731
    assert train(MICRO, make) == pytest.approx(plain(make), rel=1e-12)


class Counting:
    """A hook with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, given: Any, out: Any) -> Any:
        if isinstance(module, nn.Linear):
            self.calls += 1
            return out * (1 + 0.05 * self.calls)
        return None


@pytest.mark.parametrize("on_all", [False, True])
def test_the_state_of_a_hook_is_state(on_all: bool) -> None:
    hooks: list[Any] = []

    def hooked() -> nn.Module:
        made = linear()
        for each in hooks:
            each.remove()
        hooks[:] = [(register_module_forward_hook if on_all else made.register_forward_hook)(Counting())]
        return made

    try:
        assert train(SERIAL, hooked, softmax) == pytest.approx(plain(hooked, softmax), rel=1e-12)
        for plan in (MICRO, RECOMPUTE):
            refused(plan, r"encoder \(Linear\) changes its (_forward_hooks|hooks on all modules)", hooked, softmax)
    finally:
        hooks[0].remove()


class Taught(nn.Module):
    """Follows itself with a mean of its weights, in a module that is not registered."""

    def __init__(self, teacher: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.teacher = nn.Linear(FEATURES, FEATURES), teacher

    def forward(self, x: Tensor) -> Any:
        teacher = self.teacher()
        with torch.no_grad():
            teacher.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
        return self.linear(x) + teacher(x).detach()


TEACHER: Any = None


def hidden() -> nn.Module:
    held = [nn.Linear(FEATURES, FEATURES).double()]
    return Taught(lambda: held[0])


def global_teacher() -> nn.Module:
    global TEACHER
    TEACHER = nn.Linear(FEATURES, FEATURES).double()
    return Taught(lambda: TEACHER)


@pytest.mark.parametrize("make", [hidden, global_teacher])
def test_a_module_that_is_not_registered_is_left_as_it_was(make: Make) -> None:
    assert train(SERIAL, make) == pytest.approx(plain(make), rel=1e-12)
    for plan in (MICRO, RECOMPUTE):
        refused(plan, r"encoder \(Taught\) changes its (teacher|value|held|TEACHER) \(Linear\) in forward", make)
    made = model(make)
    made.head.forward = lambda y: made.encoder(y)
    with pytest.raises(PlanError, match=r"head \(Head\) reaches encoder through"):
        _check_plan(made, ParallelPlan(stages=2, cuts=(2,)), TrainSpec())


def test_a_head_is_not_tried_behind_an_encoder_that_cannot_be_put_back() -> None:
    class Centred(Head):
        def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            return super().loss(y - y.mean(1, keepdim=True), target)

    assert train(SERIAL, LOST["count"], Centred) == pytest.approx(plain(LOST["count"], Centred), rel=1e-12)


def scripted() -> nn.Module:
    return cast(nn.Module, torch.jit.script(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())))


def with_scripted_part() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), cast(nn.Module, torch.jit.script(nn.Tanh())))


def vouched() -> nn.Module:
    made = scripted()
    made.splittable = True
    return made


@pytest.mark.parametrize("make", [scripted, with_scripted_part, vouched])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_trained(make: Make) -> None:
    expected = plain(make)
    assert train(SERIAL, make) == pytest.approx(expected, rel=1e-12)
    if make is vouched:
        assert train(MICRO, make) == pytest.approx(expected, rel=1e-12)
    else:
        refused(MICRO, r"TorchScript does not run on copies of its weights\); .* set encoder.splittable = True", make)
    with pytest.raises(PlanError, match=r"encoder.* is TorchScript, .* remove plan.stages"):
        _check_plan(model(make), ParallelPlan(stages=2, cuts=(2,)), TrainSpec())


def test_a_model_that_a_trial_would_leave_with_copies_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "put_back", lambda self: None)
    with pytest.raises(PlanError, match="trying head left other tensors in the model than it had"):
        train(SERIAL)


class TakesTargets(Head):
    """Has a forward that its loss calls."""

    def forward(self, y: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        return scored(self.out(y - y.mean(1, keepdim=True)), target)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self(y, target)  # type: ignore[no-any-return]


class OnlyTrains(Head):
    def forward(self, y: Tensor) -> Any:
        raise NotImplementedError

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().loss(y, target)
        return total + 0.1 * (y[1:] - y[:-1]).square().sum(), count


class InPlace(Head):
    """Works on what it reads; `mixed`: over lanes."""

    mixed = False

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y -= y.detach().mean(1 if self.mixed else 2, keepdim=True)
        return super().loss(y, target)


class MixedInPlace(InPlace):
    mixed = True


def test_a_head_is_compared_by_its_loss_whatever_its_forward_takes_and_whatever_it_does_to_its_input() -> None:
    refused(MICRO, r"head \(TakesTargets\) returns a loss of .* in parts when split by lanes", head=TakesTargets)
    refused(CHUNKS, r"head \(OnlyTrains\) returns a loss .* in parts when split by time", head=OnlyTrains)
    refused(MICRO, r"head \(MixedInPlace\) returns a loss of .* in parts when split by lanes", head=MixedInPlace)
    for head, plan in ((TakesTargets, CHUNKS), (OnlyTrains, MICRO), (InPlace, {**MICRO, **CHUNKS, **RECOMPUTE})):
        assert train(plan, head=head) == pytest.approx(plain(head=head), rel=1e-9)


def test_a_stage_of_the_head_alone_keeps_what_it_has_received() -> None:
    made = model(head=InPlace)
    stage = Stage(made, made.units - 1)
    given = batch()
    assert given.targets is not None
    y = torch.randn(STEPS, LANES, FEATURES).double().requires_grad_()
    before, chunk = y.detach().clone(), Chunk(given.lengths, None, given.lanes, 0, random.key(0))
    total, _ = stage.loss(stage(y, State(()), chunk)[0], State(()), given.targets, chunk)
    total.backward()
    assert torch.equal(y, before)
    assert y.grad is not None


class FromOne(Head):
    """Counts its classes from 1."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        target -= 1
        target[target < 0] = 0
        return super().loss(y, target)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Any:
        x += 1
        return self.linear(x)


def from_one(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    target -= 1
    return scored(out, target.clamp(min=0))


@pytest.mark.parametrize("plan", [MICRO, CHUNKS, RECOMPUTE])
def test_what_changes_its_batch_in_place_is_refused(plan: Plan) -> None:
    refused(plan, r"head \(FromOne\) changes its targets in place", head=FromOne)
    refused(plan, r"encoder \(Shifted\) changes its input in place", Shifted)
    if plan is not CHUNKS:
        trainer = cw.Trainer(nn.Linear(FEATURES, CLASSES).double(), {"lr": 0.1, "precision": "fp64"}, loss=from_one, plan=plan)
        with pytest.raises(PlanError, match=r"loss \(from_one\) changes its targets in place"):
            trainer.step(batch())


def centre(module: nn.Module, given: Any, out: Any) -> Any:
    return out - out.mean(1, keepdim=True) if isinstance(module, nn.Linear) else None


def softmax() -> nn.Module:
    return Softmax(FEATURES, CLASSES)


def test_modules_of_torch_are_not_known_under_a_hook_on_all_or_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"encoder \(Linear\) gives different results for a lane"
    handle = register_module_forward_hook(centre)
    try:
        refused(MICRO, words, head=softmax)
    finally:
        handle.remove()
    assert len(train(MICRO, head=softmax)) == 2
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: centre(self, x, original(self, x)))
    refused(MICRO, words, head=softmax)


def test_a_hook_on_all_modules_is_noticed_when_it_comes() -> None:
    trainer = cw.Trainer(model(), {"lr": 0.1, "precision": "fp64"}, plan=MICRO, device="cpu")
    for seed in range(4):
        trainer.step(batch(seed))
    handle = register_module_forward_hook(centre)
    try:
        with pytest.raises(PlanError, match=r"\(Linear\) gives different results for a lane"):
            trainer.step(batch(4))
    finally:
        handle.remove()


def test_a_loss_put_on_our_head_is_compared() -> None:
    def made() -> nn.Module:
        head = softmax()
        head.loss = lambda y, target: (scored(torch.cat((y, y), -1), target)[0] / 2, torch.ones(()))
        return head

    refused(MICRO, r"head \(Softmax\) returns a (loss|target count)", head=made)


def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(UserError, match=r"the model's encoder\.0\.weight has no shape yet; run its module on a batch once"):
        train(SERIAL, lambda: nn.Sequential(nn.LazyLinear(FEATURES), nn.Tanh()))


def test_a_module_that_raises_says_so_itself_and_where() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no such thing")

    class FailsWhole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] < LANES, "too many"
            return x

    for make, kind in ((Fails, ValueError), (FailsWhole, PlanError)):
        with pytest.raises(kind, match=r"no such thing|encoder \(FailsWhole\) could not be run on a whole batch.*: too many") as caught:
            train(MICRO, make)
        shown = caught.value.__cause__ or caught.value
        assert any(frame.name == "forward" and frame.filename == __file__ for frame in extract_tb(shown.__traceback__))
