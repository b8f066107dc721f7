"""An average of the weights: its definition, what skips it, how it is kept and used, and what refuses it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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


@pytest.mark.parametrize("of", ["cw.Model", "any module"])
def test_torchs_average_in_a_loop_of_ones_own(of: str) -> None:
    net: nn.Module = build() if of == "cw.Model" else nn.Linear(3, 2).double()
    loss = None if of == "cw.Model" else lambda out, target: ((out - target).square().sum(), torch.tensor(target.numel()))
    trainer = cw.Trainer(net, {"lr": 0.05}, loss=loss)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    wanted: dict[str, Tensor] = {}
    numbers = torch.arange(60, dtype=torch.float64).cos().view(4, 5, 3)
    given = batches(4) if of == "cw.Model" else [cw.Batch.of(numbers + each, numbers[..., 1:]) for each in range(4)]
    for batch in given:
        trainer.step(batch)
        averaged.update_parameters(net)
        now = {name: p.detach().clone() for name, p in net.named_parameters()}
        wanted = {name: DECAY * wanted[name] + (1 - DECAY) * each for name, each in now.items()} if wanted else now
    raw = {name: p.detach().clone() for name, p in net.named_parameters()}
    with trainer.evaluation_weights(averaged):
        found = trainer.evaluate(given[:1])
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.detach(), wanted[name], rtol=1e-12, atol=1e-14)  # float64
    assert all(torch.equal(p, raw[name]) for name, p in net.named_parameters())
    assert found != trainer.evaluate(given[:1])


@pytest.mark.parametrize("ours", [True, False])
def test_weights_to_be_evaluated_are_not_trained_or_saved_as_others(ours: bool) -> None:
    trainer = cw.Trainer(net := build(), KEYS if ours else {"lr": 0.05})
    averaged = None if ours else AveragedModel(net)
    [first, second] = batches(2)
    trainer.step(first)
    state, raw = trainer.state_dict(), trainer.gathered()
    trainer.backward(second)
    with trainer.evaluation_weights(averaged):
        for refused in (trainer.apply, lambda: trainer.backward(second), lambda: trainer.load_state_dict(state)):
            with pytest.raises(UserError, match=r"inside trainer\.evaluation_weights\(\) the model has other weights"):
                refused()
    trainer.zero_grad()
    with trainer.evaluation_weights(averaged):
        trainer.evaluate([second])
        for refused in (lambda: trainer.step(second), trainer.state_dict):
            with pytest.raises(UserError, match=r"inside trainer\.evaluation_weights\(\) the model has other weights"):
                refused()
    assert all(torch.equal(tensor, raw[name]) for name, tensor in trainer.gathered().items())
    trainer.step(second)


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
