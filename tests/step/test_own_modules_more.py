"""What surrounds a user's modules: dropout beside them, past values, replaced methods, and targets of which a first stage knows nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.data.batch import Batch
from carrywave.errors import PlanError, UserError
from carrywave.model.encoders import Numbers
from carrywave.model.heads import Forecast, PooledSoftmax, Softmax
from carrywave.model.model import Model
from carrywave.step.checks.own_modules.probe_sample import few_of
from carrywave.step.trainer import Trainer


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize("part", ["dropout_in", "dropout_out"])
def test_only_dropout_is_dropout(part: str) -> None:
    with pytest.raises(UserError, match=rf"{part} is a Mean, but only dropout belongs there; make it a part of the (encoder|head)"):
        Model(Numbers(3), cw.LSTM(3, 4), Softmax(4, 2), **{part: Mean()})
    Model(Numbers(3), cw.LSTM(3, 4), Softmax(4, 2), **{part: nn.Dropout(0.1)})


def test_a_score_put_in_place_of_ours_is_compared() -> None:
    head = Softmax(4, 2)

    def score(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        centred = logits - logits.mean(1, keepdim=True)
        return nn.functional.cross_entropy(centred.flatten(0, 1), target.flatten(), reduction="sum"), torch.tensor(target.numel())

    head.score = score  # type: ignore[method-assign]
    trainer = Trainer(Model(Numbers(3), cw.LSTM(3, 4), head), plan={"micro_batches": 2})
    with pytest.raises(PlanError, match="head"):
        trainer.step(Batch.of(torch.randn(5, 4, 3), torch.randint(2, (5, 4))))


@pytest.mark.parametrize("plan", [{}, {"chunk_steps": 2}, {"micro_batches": 2}])
def test_a_history_of_another_shape_is_refused_on_every_plan(plan: dict[str, int]) -> None:
    x, target = torch.randn(6, 4, 3), torch.randn(6, 4, 2, 1)
    for shape in ((6, 1, 1), (9, 7, 1), (10, 4)):
        with pytest.raises(UserError, match=r"history has shape .* for 6 steps, 4 lanes; pass \[past - 1 \+ 6, 4, columns\]"):
            Batch.of(x, target, history=torch.randn(shape))
    trainer = Trainer(Model(Numbers(3), cw.LSTM(3, 4), Forecast(4, 2, 1, linear=True, past_steps=5)), plan=plan)
    with pytest.raises(UserError, match="the history of the batch has 0 rows before its first step; pass 4 of them"):
        trainer.step(Batch.of(x, target, history=torch.randn(6, 4, 1)))
    trainer = Trainer(Model(Numbers(3), cw.LSTM(3, 4), Forecast(4, 2, 1, linear=True, past_steps=5)), plan=plan)
    trainer.step(Batch.of(x, target, history=torch.randn(10, 4, 1)))


def test_a_subclass_of_a_head_that_reads_the_past_is_refused() -> None:
    class Other(Forecast):
        pass

    with pytest.raises(UserError, match="Other is a subclass of a head that reads past values"):
        Model(Numbers(3), cw.LSTM(3, 4), Other(4, 2, 1, linear=True, past_steps=5))


def test_a_first_stage_tries_its_encoder_without_targets() -> None:
    batch = Batch.of(torch.randn(5, 4, 3), torch.randint(2, (4,)), pooled=True)
    few = few_of(batch.without(inputs=False, targets=True), torch.zeros(2, dtype=torch.int32), 4, pooled=False, whole_time=False)
    assert few.targets is None
    assert isinstance(Model(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), cw.LSTM(3, 4), PooledSoftmax(4, 2)).head, PooledSoftmax)
