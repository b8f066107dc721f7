"""What a loop sets between two steps is found, so that workers can compare it; what a step leaves behind is not."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.model.heads.classes import Softmax
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
    assert between.changes(modes=True) == [name]
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


def test_a_part_that_is_vouched_for_may_be_changed() -> None:
    model = made()
    between = BetweenSteps(model)
    model.encoder.splittable = True
    model.encoder.gain = 2.0
    assert between.changes(modes=True) == []
