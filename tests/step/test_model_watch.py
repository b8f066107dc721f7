"""What notices that a callback has changed the model on one worker alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.model.modes import TrainingModes
from carrywave.step.checks.own_modules.model_watch import ModelWatch

OUTSIDE = {"scale": 1.0}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.temperature, self.seen = nn.Linear(4, 2), 1.0, 0
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("passing", torch.ones(100), persistent=False)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.out(y) / self.temperature * self.scale * OUTSIDE["scale"]
        return out

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (self(y) - target).square().sum(), torch.tensor(target.numel())


def made() -> cw.Model:
    return cw.Model(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2)), cw.LSTM(4, 4, num_layers=2), Head())


def watched(model: cw.Model, change: Callable[[cw.Model], object]) -> str | None:
    watch = ModelWatch(model, TrainingModes(model))
    watch.begin()
    assert watch.changed() is None
    watch.begin()
    change(model)
    return watch.changed()


CHANGES: dict[str, Callable[[cw.Model], object]] = {
    "head.temperature": lambda model: setattr(model.head, "temperature", 3.0),
    "head.scale": lambda model: model.head.scale.fill_(3.0),
    "head.training": lambda model: model.head.eval(),
    "head.passing": lambda model: model.head.passing.mul_(2),
    "encoder.0.weight": lambda model: model.encoder.requires_grad_(False),
    "head.out.weight": lambda model: nn.init.zeros_(model.head.out.weight),
    "encoder.1.p": lambda model: setattr(model.encoder[1], "p", 0.0),
    "encoder.training": lambda model: model.encoder.eval(),
    "lstm.weight_hh_l1": lambda model: nn.init.orthogonal_(model.lstm.weight_hh_l1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_would_change_the_answer_is_named(name: str) -> None:
    assert watched(made(), CHANGES[name]) == name


def test_so_are_hooks_and_variables_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = watched(made(), lambda model: model.encoder.register_forward_hook(lambda module, given, out: out * 2))
    assert hooked is not None
    assert hooked.startswith("encoder.")
    outside = watched(made(), lambda model: monkeypatch.setitem(OUTSIDE, "scale", 2.0))
    assert outside is not None
    assert outside.startswith("a variable that its code reads")


def test_what_no_step_reads_may_be_set() -> None:
    assert watched(made(), lambda model: setattr(model.head, "seen", 2)) is None
    assert watched(made(), lambda model: setattr(model.head, "best", 0.5)) is None


def test_a_look_at_the_model_changes_nothing() -> None:
    """As a callback does that shows what the model says; before the next step it is put back into training mode."""

    def look(model: cw.Model) -> None:
        model.eval()
        with torch.no_grad():
            y, state = model(torch.zeros(5, 2, 3))
            model.output(y, state)

    assert watched(made(), look) is None


def test_what_its_owner_vouches_for_is_looked_at_for_its_weights_alone() -> None:
    model = made()
    model.head.splittable = True
    assert watched(model, CHANGES["head.temperature"]) is None
    assert watched(model, CHANGES["head.out.weight"]) == "head.out.weight"


def test_a_model_that_is_in_evaluation_mode_as_after_the_last_step_has_not_changed() -> None:
    model = made()
    watch = ModelWatch(model, TrainingModes(model))
    model.eval()
    watch.begin()
    assert watch.changed() is None
    model.train()  # after an evaluation of the callback's own
    assert watch.changed() is None
    assert not model.training
