"""Resets inside a window: sequences one after the other in a lane are trained on as if each had a lane of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.data.batch import IGNORED
from carrywave.errors import UserError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.pooled import PooledSoftmax
from carrywave.model.initialization import initialize
from carrywave.model.model import Model
from carrywave.model.over_time.front import Front

TOKENS, CLASSES = 7, 3
LANES = ((3, 4), (1, 5, 1), (7,), (2, 2))  # the lengths of the sequences in each lane of 7 steps; the last lane is padded


def model_of(**options: Any) -> Model:
    head = options.pop("head", None)
    lstm = cw.LSTM(4, 5, 2, learned_carry=True, dtype=torch.float64, **options)
    model = Model(Embedding(TOKENS, 4).double(), lstm, (head or Softmax(lstm.output_size, CLASSES)).double())
    initialize(model, 1)
    with torch.no_grad():
        for name, parameter in lstm.named_parameters():
            if name.startswith("carry"):
                parameter.fill_(0.3)
    return model


def both_ways() -> tuple[cw.Batch, cw.Batch]:
    """The same sequences, each in a lane of its own, and one after the other."""
    generator = torch.Generator().manual_seed(3)
    count, longest = sum(map(len, LANES)), max(map(max, LANES))
    x, target = torch.zeros(longest, count, dtype=torch.int64), torch.full((longest, count), IGNORED)
    laid, laid_target = torch.zeros(7, len(LANES), dtype=torch.int64), torch.full((7, len(LANES)), IGNORED)
    resets, number = torch.zeros(7, len(LANES), dtype=torch.bool), 0
    for lane, lengths in enumerate(LANES):
        at = 0
        for length in lengths:
            x[:length, number] = torch.randint(TOKENS, (length,), generator=generator)
            target[:length, number] = torch.randint(CLASSES, (length,), generator=generator)
            laid[at : at + length, lane] = x[:length, number]
            laid_target[at : at + length, lane] = target[:length, number]
            resets[at, lane] = at > 0
            at, number = at + length, number + 1
    lengths = [length for lane in LANES for length in lane]
    packed = cw.Batch.of(laid, laid_target, [sum(lane) for lane in LANES], resets=resets, step=0)
    return cw.Batch.of(x, target, lengths, step=0), packed


def trained(model: Model, batch: cw.Batch, plan: dict[str, Any] | None = None, **train: Any) -> dict[str, Tensor]:
    trainer = cw.Trainer(
        model, {"precision": "fp64", "optimizer": "sgd", "lr": 1.0, "clip": None, **train}, plan=plan or {}, keep_state=False
    )
    loss = trainer.step(batch)
    return {"loss": torch.tensor(float(loss), dtype=torch.float64)} | {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("bidirectional", "chunk_steps"), [(False, None), (False, 2), (True, None)])
def test_sequences_in_one_lane_train_as_in_lanes_of_their_own(bidirectional: bool, chunk_steps: int | None) -> None:
    """With the penalties on activations and on their changes, none of which is across a reset."""
    padded, packed = both_ways()
    one = trained(model_of(bidirectional=bidirectional), padded, alpha=0.5, beta=0.7)
    other = trained(model_of(bidirectional=bidirectional), packed, {"chunk_steps": chunk_steps, "micro_batches": 2}, alpha=0.5, beta=0.7)
    torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)  # float64, another order of summation


def test_what_reads_over_the_edges_of_sequences_is_refused() -> None:
    _, packed = both_ways()
    front = Model(Front(Embedding(TOKENS, 4), [{"channels": 4, "kernel": 3, "stride": 1}]), cw.LSTM(4, 5), Softmax(5, CLASSES))
    with pytest.raises(UserError, match="the front reads over their edges"):
        cw.Trainer(front, {}).step(packed)

    labels = torch.zeros(packed.lengths.shape, dtype=torch.int64)
    batch = cw.Batch.of(packed.inputs, labels, packed.lengths, resets=packed.resets, pooled=True)
    with pytest.raises(UserError, match="the head PooledSoftmax reads each lane as one; use one for each sequence"):
        cw.Trainer(model_of(head=PooledSoftmax(5, CLASSES)), {"precision": "fp64"}).step(batch)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x[..., None].float())
            return out

    def loss(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum"), (target != IGNORED).sum()

    with pytest.raises(UserError, match="the batch has resets, which a module such as Own does not know"):
        cw.Trainer(Own(), {}, loss=loss).step(packed)
