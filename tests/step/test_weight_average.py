"""An average of the weights: its definition, what skips it, how it is kept and used, and what refuses it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _small_models import batch_of, build

import carrywave as cw
from carrywave.errors import SpecError, UserError

DECAY = 0.7
KEYS: dict[str, Any] = {"lr": 0.05, "ema": DECAY}


def batches(count: int) -> list[cw.Batch]:
    return [batch_of(4, [4, 3, 4 - number % 3]) for number in range(count)]


def weights(trainer: cw.Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.parameters().items()}


def average(trainer: cw.Trainer) -> dict[str, Tensor]:
    with trainer.evaluation_weights():
        return weights(trainer)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_it_is_a_mean_of_the_weights_after_each_step_the_older_the_less(optimizer: str) -> None:
    trainer = cw.Trainer(build(), KEYS | {"optimizer": optimizer})
    start = weights(trainer)
    assert all(torch.equal(tensor, start[name]) for name, tensor in average(trainer).items())  # before the first step
    seen = []
    for batch in batches(5):
        trainer.step(batch)
        seen.append(weights(trainer))
        shares = [DECAY ** (len(seen) - 1 - place) for place in range(len(seen))]
        for name, tensor in average(trainer).items():
            wanted = sum(share * each[name] for share, each in zip(shares, seen, strict=True)) / sum(shares)
            torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-14)  # float64; a running mean rounds at each step
        assert all(torch.equal(tensor, seen[-1][name]) for name, tensor in trainer.parameters().items())  # bit for bit as they were


def test_training_does_not_see_it_and_an_evaluation_does() -> None:
    ours, theirs = cw.Trainer(build(), KEYS), cw.Trainer(build(), {"lr": 0.05})
    for batch in batches(4):
        assert torch.equal(ours.step(batch), theirs.step(batch))
    assert all(torch.equal(tensor, theirs.parameters()[name]) for name, tensor in ours.parameters().items())
    other = build()
    other.load_state_dict(average(ours))
    [batch] = batches(1)
    assert ours.evaluate([batch]) == cw.Trainer(other, KEYS).evaluate([batch]) != theirs.evaluate([batch])


def test_a_step_that_is_skipped_leaves_it_alone() -> None:
    trainer = cw.Trainer(build(), KEYS | {"on_nan": "skip"})
    good, bad = batches(2)
    trainer.step(good)
    before, bias = average(trainer), trainer.model.head.bias
    sound = bias.detach().clone()
    with torch.no_grad():
        bias.fill_(torch.nan)
    trainer.step(bad)
    with torch.no_grad():
        bias.copy_(sound)
    assert int(trainer.optimizer.state[bias]["count"]) == 1
    after = average(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "head.bias")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"optimizer": "ntasgd"}, r"ntasgd averages weights by itself; remove ema"),
        ({"sync": "diloco"}, r"ema averages the weights of every step, which train\.sync=diloco does not exchange"),
        ({"ema": 1.0}, r"train\.ema is 1"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        cw.Trainer(build(), KEYS | keys)


def test_an_average_of_another_model_or_beside_our_own_is_refused() -> None:
    trainer = cw.Trainer(build(), {"lr": 0.05})
    with (
        pytest.raises(UserError, match=r"has no lstm\.weight_ih_l1; pass a copy of trainer\.model"),
        trainer.evaluation_weights(build(layers=1)),
    ):
        pass
    ours = cw.Trainer(build(), KEYS)
    with pytest.raises(UserError, match="evaluates with weights of its own"), ours.evaluation_weights(build()):
        pass
