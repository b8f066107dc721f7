"""A trainer with an optimizer of the user's own goes on from its state as torch's own loop would, whatever the optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import carrywave as cw
from carrywave.errors import RunError


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = nn.functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), reduction="sum")
        return total, (target != -100).sum()


def net(seed: int = 0) -> cw.Model:
    torch.manual_seed(seed)
    return cw.Model(nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5)), cw.LSTM(6, 8), Head()).double()


def batch() -> cw.Batch:
    torch.manual_seed(1)
    return cw.Batch.of(torch.randn(6, 5, 3, dtype=torch.float64), torch.randint(0, 4, (6, 5)))


def apart(one: cw.Trainer, other: cw.Trainer) -> float:
    theirs = other.gathered()
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in one.gathered().items())


class CountsInGroup(Optimizer):
    """Makes a key of its group at the first step."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / group["step"])


class CountsForAll(CountsInGroup):
    """Keeps state that is of no one parameter, and numbers of Python beside tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        known: Any = self.state
        known["all"]["n"] = known["all"].get("n", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["decay"] = state.get("decay", 1.0) * 0.9
                state["seen"] = state.get("seen", torch.zeros(())) + 1
                p.sub_(p.grad * group["lr"] * state["decay"] / known["all"]["n"])


class SaysMore(torch.optim.Adam):
    """Adds to its own state_dict."""

    n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        self.param_groups[0]["lr"] = 0.05 / self.n
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "n": self.n}

    def load_state_dict(self, state_dict: Any) -> None:
        self.n = state_dict["n"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "n"})


def with_rate(kind: type[np.generic]) -> Callable[[cw.Model], Optimizer]:
    def make(model: cw.Model) -> Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        made.param_groups[0]["lr"] = kind(0.01)  # type: ignore[call-arg]
        return made

    return make


MAKERS: dict[str, Callable[[cw.Model], Optimizer]] = {
    "a key made at the first step": lambda model: CountsInGroup(model.parameters()),
    "state of no parameter": lambda model: CountsForAll(model.parameters()),
    "more in its state_dict": lambda model: SaysMore(model.parameters()),
    "state of other shapes": lambda model: torch.optim.Adafactor(model.parameters()),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
    "a rate of numpy's": with_rate(np.float32),
    "a rate of numpy's in float64": with_rate(np.float64),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    model, given = net(), batch()
    whole = cw.Trainer(model, {}, optimizer=MAKERS[kind](model))
    for _ in range(3):
        whole.step(given)
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    other = net(5)
    again = cw.Trainer(other, {}, optimizer=MAKERS[kind](other))
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(3):
        whole.step(given)
        again.step(given)
    assert apart(whole, again) == 0.0
    # And back, in the trainer that has gone on.
    whole.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(3):
        whole.step(given)
    assert apart(whole, again) == 0.0


def test_what_is_refused_changes_nothing() -> None:
    model, given = net(), batch()
    trainer = cw.Trainer(model, {}, optimizer=torch.optim.Adam(model.parameters(), lr=0.05))
    trainer.step(given)
    before = trainer.gathered()
    other = net(3)
    parts = [{"params": other.encoder.parameters()}, {"params": [*other.lstm.parameters(), *other.head.parameters()]}]
    groups = cw.Trainer(other, {}, optimizer=torch.optim.Adam(parts))
    with pytest.raises(
        RunError, match="parameter groups does not match: the state has 2, this optimizer has 1; create the optimizer with the same groups"
    ):
        trainer.load_state_dict(groups.state_dict())
    with pytest.raises(RunError, match=r"is from a trainer with the spec's optimizer, but this one has your own optimizer; use the same"):
        trainer.load_state_dict(cw.Trainer(net(3), {}).state_dict())
    few = cw.Trainer(other, {}, optimizer=torch.optim.Adam(other.lstm.parameters()))
    with pytest.raises(RunError, match=r"group 0 of the optimizer does not match the state: encoder\.0\.bias is in this optimizer but"):
        trainer.load_state_dict(few.state_dict())
    after = trainer.gathered()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_be_saved_is_named() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["course"] = lambda step: step
    trainer = cw.Trainer(model, {}, optimizer=optimizer)
    with pytest.raises(
        RunError, match=r"the SGD group setting course is a function; only tensors, numbers, strings, and lists and dictionaries"
    ):
        trainer.state_dict()
