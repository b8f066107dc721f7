"""What a loop sets between two steps is found, so that workers can compare it; what a step leaves behind is not."""

from __future__ import annotations

import argparse
import functools
import inspect
import operator
import re
from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.model.heads.classes import Softmax
from carrywave.model.opaque_model import OpaqueModel
from carrywave.step.checks.own_modules.between_steps import BetweenSteps

WIDTH = 4


class Encoder(nn.Module):
    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.drop, self.gain, self.options = nn.Dropout(0.1), 1.0, SimpleNamespace(rate=0.5)
        self.table, self.names, self.seen = torch.ones(3), {"b", "a"}, [1.0]
        self.losses: list[float] = []
        self.path, self.new = "", 1.0
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.last = float(x.sum())
        if not self.training:
            self.looked_at = x
        if self.kind != "plain":
            x = self.more(x)
        return self.drop(x * self.scale * self.kept * self.passing * self.gain)

    def more(self, x: Tensor) -> Tensor:
        return x * self.table * self.options.rate * len(self.names) * len(self.seen) * len(self.path) * self.new

    @cached_property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def note(self, loss: float) -> None:
        self.losses.append(loss)


def made() -> Any:
    return cw.Model(Encoder(), cw.LSTM(3, WIDTH, dropout=0.1, num_layers=2), Softmax(WIDTH, 2))


CHANGES: dict[str, Callable[[Any], object]] = {
    "encoder.gain 2.0": lambda model: setattr(model.encoder, "gain", 2.0),
    "encoder.new 2.0": lambda model: setattr(model.encoder, "new", 2.0),
    "encoder.path": lambda model: setattr(model.encoder, "path", "/a"),  # which may differ between workers
    "encoder.options.rate 0.7": lambda model: setattr(model.encoder.options, "rate", 0.7),
    "encoder.table": lambda model: model.encoder.table.mul_(2),
    "encoder.passing": lambda model: model.encoder.passing.mul_(2),
    "encoder.names": lambda model: model.encoder.names.add("c"),
    "encoder.seen": lambda model: model.encoder.seen.append(2.0),
    "encoder.drop.p 0.3": lambda model: setattr(model.encoder.drop, "p", 0.3),
    "encoder.drop.training False": lambda model: model.encoder.drop.eval(),
    "encoder._forward_hooks 1": lambda model: model.encoder.register_forward_hook(lambda *given: None),
    "lstm.dropout 0.4": lambda model: setattr(model.lstm, "dropout", 0.4),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_set_is_found_until_the_next_step(name: str) -> None:
    model = made()
    between = BetweenSteps(model)
    assert between.changes(modes=True) == []
    CHANGES[name](model)
    assert [re.sub(r" \(checksum \w+\)", "", each) for each in between.changes(modes=True)] == [name]
    between.settle()
    assert between.changes(modes=False) == []


UNREAD: dict[str, Callable[[Any], object]] = {
    "history": lambda model: model.encoder.note(0.5),
    "best": lambda model: setattr(model.head, "best", 0.5),
    "time": lambda model: setattr(model.encoder, "started", 1.5),
    "cached": lambda model: model.encoder.size,
    "picture": lambda model: model.eval()(torch.ones(2, 2, 3)),
}


@pytest.mark.parametrize("name", [name for name in UNREAD if name != "best"])
def test_what_no_step_reads_may_be_set(name: str) -> None:
    """A loop may keep what it likes with the model, on one worker alone."""
    model = made()
    between = BetweenSteps(model)
    model(torch.ones(2, 2, 3))
    between.settle()
    UNREAD[name](model)
    assert between.changes(modes=False) == []


READS = (
    *("getattr(self, name)", "vars(self)[name]", "self.__dict__[name]", "self.gain", "helper(self)", "self.reader(self)"),
    *("operator.attrgetter(name)(self)", "dict(inspect.getmembers(self))[name]", "object.__getattribute__(self, name)"),
)


@pytest.mark.parametrize("how", READS)
def test_whatever_code_may_read_counts(how: str) -> None:
    given: dict[str, Any] = {"name": "gain", "helper": eval("lambda module: module.gain"), "inspect": inspect, "operator": operator}
    exec(f"def forward(self, x): return x * {how}", given)
    made_of = {"forward": given["forward"], "gain": 1.0, "reader": operator.attrgetter("gain"), "__module__": __name__}
    model = made()
    model.encoder = type("Own", (nn.Module,), made_of)()
    between = BetweenSteps(model)
    model.encoder.gain = 2.0
    assert between.changes(modes=True) == ["encoder.gain 2.0"]


@pytest.mark.parametrize("alias", ["read", "attributes"])
def test_what_reads_under_another_name_counts(alias: str) -> None:
    given: dict[str, Any] = {"name": "gain", "read": getattr, "attributes": vars}
    how = {"read": "read(self, name)", "attributes": "attributes(self)[name]"}[alias]
    exec(f"def forward(self, x): return x * {how}", given)
    model = made()
    model.encoder = type("Own", (nn.Module,), {"forward": given["forward"], "gain": 1.0, "__module__": __name__})()
    between = BetweenSteps(model)
    model.encoder.gain = 2.0
    assert between.changes(modes=True) == ["encoder.gain 2.0"]


class Methods(nn.Module):
    """Code that is reached through what Python makes of functions."""

    gain, rate = 1.0, 1.0

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return x * self.gain * factor

    halved = functools.partialmethod(scaled, factor=0.5)

    @functools.singledispatchmethod
    def kind(self, x: object) -> Any:
        return x

    @kind.register
    def _(self, x: Tensor) -> Tensor:
        return x * self.rate

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.kind(self.halved(x))
        return out


@pytest.mark.parametrize("name", ["gain", "rate"])
def test_methods_that_python_wraps_are_looked_into(name: str) -> None:
    model = made()
    model.encoder = Methods()
    between = BetweenSteps(model)
    setattr(model.encoder, name, 2.0)
    assert between.changes(modes=True) == [f"encoder.{name} 2.0"]


SETTINGS = {"factor": 1.0, "best": 1.0}
FACTOR = 1.0


class Scaled(Encoder):
    kind = "scaled"
    rates: ClassVar[dict[str, float]] = {"a": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.args, self.cache = argparse.Namespace(factor=1.0), dict[int, Tensor]()

    def more(self, x: Tensor) -> Tensor:
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.ones(3)
        out: Tensor = x * FACTOR * SETTINGS["factor"] * self.rates["a"] * self.args.factor * self.cache[len(x)]
        return out


def replaced(self: nn.Module, x: Tensor) -> Tensor:
    return x


OUTSIDE: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "the variable FACTOR 2.0": lambda _, patch: patch.setitem(globals(), "FACTOR", 2.0),
    "the variable SETTINGS.factor 2.0": lambda _, patch: patch.setitem(SETTINGS, "factor", 2.0),
    "encoder.kind 'other'": lambda _, patch: patch.setattr(Scaled, "kind", "other"),
    "encoder.rates.a 2.0": lambda _, patch: patch.setitem(Scaled.rates, "a", 2.0),
    "encoder.more": lambda _, patch: patch.setattr(Scaled, "more", replaced),
    "encoder.args.factor 2.0": lambda model, patch: patch.setattr(model.encoder.args, "factor", 2.0),
}
OTHERS: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "best": lambda _, patch: patch.setitem(SETTINGS, "best", 2.0),
    "namespace": lambda model, _: setattr(model.encoder.args, "best", 2.0),
    "cache": lambda model, _: model.encoder.cache.update({7: torch.ones(3)}),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_step_reads_elsewhere_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class's attribute hides that of its base."""
    model = made()
    model.encoder = Scaled()
    between = BetweenSteps(model)
    OUTSIDE[name](model, monkeypatch)
    assert between.changes(modes=True) == [name.partition(" '")[0]]


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_a_loop_reads_there_may_be_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are often where a program keeps its results, too; and entries come and go in a cache that steps fill."""
    model = made()
    model.encoder = Scaled()
    between = BetweenSteps(model)
    between.changes(modes=True)
    model(torch.ones(2, 2, 3))
    between.settle()
    OTHERS[name](model, monkeypatch)
    assert between.changes(modes=True) == []


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, out: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (out - target).square().sum() * self.factor, len(out)


class Called:
    def __init__(self) -> None:
        self.factor, self.seen = 1.0, 0

    def __call__(self, out: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return Loss()(out, target)[0] * self.factor, len(out)


class Remembers(nn.Linear):
    lanes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.lanes != len(x):
            self.lanes = len(x)
        return super().forward(x)


def test_a_loss_beside_the_model_counts() -> None:
    inner, called = Loss(), Called()
    losses: list[tuple[Any, Any, str]] = [(inner, inner, "loss.factor 2.0"), (called, called, "loss.factor 2.0")]
    losses.append((inner, lambda out, target: inner(out, target), "the variable inner.factor 2.0"))
    for owner, loss, name in losses:
        owner.factor = 1.0
        between = BetweenSteps(OpaqueModel(nn.Linear(3, 2), loss))
        owner.factor = 2.0
        assert between.changes(modes=True) == [name]


def test_a_loss_that_reads_the_model_counts_it_once() -> None:
    module = Remembers(3, 2)
    module.splittable = True  # type: ignore[assignment]
    between = BetweenSteps(OpaqueModel(module, lambda out, target: (out.sum() * module.lanes, len(out))))
    module.lanes = 2
    assert between.changes(modes=True) == []


def test_other_numbers_in_what_was_set_show() -> None:
    """As where each worker draws a table for itself."""
    said = set()
    for value in (1.0, 1.0, 2.0):
        model = made()
        model.encoder.kind = "scaled"
        between = BetweenSteps(model)
        model.encoder.table, model.encoder.seen = torch.full((3,), value + 1), [value, value]
        said.add(tuple(between.changes(modes=True)))
    assert len(said) == 2


def test_weights_and_saved_buffers_are_left_to_others() -> None:
    model = made()
    between = BetweenSteps(model)
    with torch.no_grad():
        model.encoder.scale.mul_(2)
        model.encoder.kept.mul_(2)
    assert between.changes(modes=True) == []


def test_what_a_step_leaves_behind_may_change_at_any_time() -> None:
    """As when one worker alone has the model tell something between two steps."""
    model = made()
    between = BetweenSteps(model)
    between.changes(modes=True)
    model(torch.ones(2, 2, 3))
    between.settle()
    model(torch.zeros(2, 2, 3))
    assert between.changes(modes=True) == []


def test_what_the_steps_of_another_trainer_leave_behind_may_differ() -> None:
    """As where a discriminator is trained by itself and behind a generator."""

    inner = Remembers(3, 2)
    one, other = (BetweenSteps(OpaqueModel(module, Loss())) for module in (inner, nn.Sequential(inner, nn.Tanh())))
    one.changes(modes=True)
    inner(torch.ones(5, 3))
    one.settle()
    assert other.changes(modes=True) == []


def test_a_part_that_is_vouched_for_may_be_changed() -> None:
    model = made()
    between = BetweenSteps(model)
    model.encoder.splittable = True
    model.encoder.gain = 2.0
    assert between.changes(modes=True) == []
