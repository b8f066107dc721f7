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
from carrywave.model.heads.pooled import Accumulator, PooledSoftmax
from carrywave.model.initialization import initialize
from carrywave.model.model import Model
from carrywave.model.over_time import segments
from carrywave.model.over_time.front import Front
from carrywave.model.over_time.pooling import POOLS

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


def both_ways(*, labels: bool = False) -> tuple[cw.Batch, cw.Batch]:
    """The same sequences, each in a lane of its own, and one after the other."""
    generator = torch.Generator().manual_seed(3)
    count, longest = sum(map(len, LANES)), max(map(max, LANES))
    x, target = torch.zeros(longest, count, dtype=torch.int64), torch.full((longest, count), IGNORED)
    label = torch.randint(CLASSES, (count,), generator=generator)
    laid, laid_target = torch.zeros(7, len(LANES), dtype=torch.int64), torch.full((7, len(LANES)), IGNORED)
    resets, number = torch.zeros(7, len(LANES), dtype=torch.bool), 0
    for lane, lengths in enumerate(LANES):
        at = 0
        for length in lengths:
            x[:length, number] = torch.randint(TOKENS, (length,), generator=generator)
            target[:length, number] = torch.randint(CLASSES, (length,), generator=generator)
            laid[at : at + length, lane] = x[:length, number]
            laid_target[at : at + length, lane] = target[:length, number]
            if labels:
                laid_target[at : at + length - 1, lane] = IGNORED
                laid_target[at + length - 1, lane] = label[number]
            resets[at, lane] = at > 0
            at, number = at + length, number + 1
    lengths = [length for lane in LANES for length in lane]
    packed = cw.Batch.of(laid, laid_target, [sum(lane) for lane in LANES], resets=resets, step=0, pooled=labels)
    return cw.Batch.of(x, label if labels else target, lengths, step=0, pooled=labels), packed


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


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("bidirectional", "chunk_steps"), [(False, None), (False, 2), (True, None)])
def test_sequences_in_one_lane_are_pooled_each_by_itself(pool: str, bidirectional: bool, chunk_steps: int | None) -> None:
    def made() -> Model:
        head = PooledSoftmax(10 if bidirectional else 5, CLASSES, pool)
        model = model_of(bidirectional=bidirectional, head=head)
        if head.query is not None:
            torch.nn.init.uniform_(head.query, -2.0, 2.0, generator=torch.Generator().manual_seed(1))
        return model

    padded, packed = both_ways(labels=True)
    other = trained(made(), packed, {"chunk_steps": chunk_steps, "micro_batches": 2}, alpha=0.5, beta=0.7)
    torch.testing.assert_close(other, trained(made(), padded, alpha=0.5, beta=0.7), rtol=1e-10, atol=1e-12)  # as above


@pytest.mark.parametrize("plan", [{"micro_batches": 2}, {"chunk_steps": 3}])
def test_a_head_with_weights_of_its_own_kind_is_tried_with_resets(plan: dict[str, int]) -> None:
    """It is not known to be safe, so it is run whole and in pieces before it is trained."""

    def loss_of(batch: cw.Batch, **asked: Any) -> float:
        torch.manual_seed(0)
        head = nn.utils.parametrizations.weight_norm(PooledSoftmax(5, CLASSES))
        return float(cw.Trainer(model_of(head=head), {"precision": "fp64"}, **asked).step(batch))

    padded, packed = both_ways(labels=True)
    assert loss_of(packed, plan=plan) == pytest.approx(loss_of(padded), rel=1e-12)  # float64, another order of summation


def test_of_equal_outputs_the_first_has_the_gradient() -> None:
    """In half precision outputs are often equal; however time is cut, and whatever lies beside a sequence, the gradient is the same."""
    y = torch.tensor([1.0, 3.0, 3.0, 2.0, 2.0, 5.0])[:, None, None].requires_grad_()
    resets = torch.tensor([False, False, False, True, False, False])[:, None]
    at = segments.places_of(resets, torch.tensor([5]), 2)
    rows = segments.add("max", y, at, torch.zeros(1, 1), torch.tensor([0]), two_ways=False, query_W=None)
    assert rows.flatten().tolist() == [3.0, 2.0]
    rows.sum().backward()
    assert y.grad is not None
    assert y.grad.flatten().tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def test_a_pooled_target_before_the_end_of_its_sequence_is_refused() -> None:
    _, packed = both_ways(labels=True)
    assert packed.targets is not None
    early = packed.targets.clone()
    early[1, 0] = 1
    with pytest.raises(UserError, match="one target for each sequence, at its last step, but there is one at step 1 of lane 0"):
        cw.Batch.of(packed.inputs, early, packed.lengths, resets=packed.resets, pooled=True)
    with pytest.raises(UserError, match="there is one at step 1 of lane 0"):
        cw.Trainer(model_of(head=PooledSoftmax(5, CLASSES)), {"precision": "fp64"}).step(
            cw.Batch.of(packed.inputs, early, packed.lengths, resets=packed.resets)
        )


def test_the_model_reads_resets() -> None:
    padded, packed = both_ways()
    model = model_of()
    assert packed.resets is not None
    y, _ = model(packed.inputs, lengths=packed.lengths, resets=packed.resets)
    alone, _ = model(padded.inputs, lengths=padded.lengths)
    torch.testing.assert_close(y[3:7, 0], alone[:4, 1], rtol=1e-11, atol=1e-12)  # float64
    with pytest.raises(UserError, match=r"Model got resets of shape \[4, 7\] in torch.bool"):
        model(packed.inputs, resets=packed.resets.t())


def test_what_a_batch_counts() -> None:
    padded, packed = both_ways()
    assert packed.resets is not None
    assert packed.changes == padded.changes == sum(length - 1 for lane in LANES for length in lane)
    part = packed.take(1, 3, pooled=False)
    assert part.resets is not None
    assert torch.equal(part.resets, packed.resets[:, 1:3])
    assert part.changes == packed.changes
    idle = packed.take(2, 2, pooled=False).resets
    assert idle is not None
    assert not idle.any()
    # Where a lane has ended, nothing starts.
    late = torch.ones(7, 4, dtype=torch.bool)
    again = cw.Batch.of(packed.inputs, packed.targets, packed.lengths, resets=late).resets
    assert again is not None
    assert torch.equal(again.sum(0), packed.lengths)


@pytest.mark.parametrize("resets", [torch.zeros(7, 4), torch.zeros(4, 7, dtype=torch.bool), [True, False]])
def test_resets_are_checked(resets: Any) -> None:
    with pytest.raises(UserError, match=r"resets has shape .* pass true or false for each step of each lane, \[7, 4\]"):
        cw.Batch.of(torch.zeros(7, 4, dtype=torch.int64), resets=resets)


def test_what_reads_over_the_edges_of_sequences_is_refused() -> None:
    _, packed = both_ways()
    front = Model(Front(Embedding(TOKENS, 4), [{"channels": 4, "kernel": 3, "stride": 1}]), cw.LSTM(4, 5), Softmax(5, CLASSES))
    with pytest.raises(UserError, match="the front reads over their edges"):
        cw.Trainer(front, {}).step(packed)

    class Greatest(PooledSoftmax):
        def pool(self, y_TBW: Tensor, lengths_B: Tensor, acc: Accumulator) -> Accumulator:
            return super().pool(y_TBW, lengths_B, acc)

    class Mean(PooledSoftmax):
        def score(self, logits_BV: Tensor, label_B: Tensor) -> tuple[Tensor, Tensor]:
            total, count = super().score(logits_BV, label_B)
            return total / count, torch.ones_like(count)

    hooked = PooledSoftmax(5, CLASSES)
    hooked.register_forward_hook(lambda module, given, out: out - out.mean(0))
    for head in (Greatest(5, CLASSES), Mean(5, CLASSES), hooked):
        with pytest.raises(UserError, match=f"the head {type(head).__name__} makes one result of each lane; .* without methods and hooks"):
            cw.Trainer(model_of(head=head), {"precision": "fp64"}).step(both_ways(labels=True)[1])

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


def test_evaluation_reads_resets() -> None:
    padded, packed = both_ways(labels=True)
    trainer = cw.Trainer(model_of(head=PooledSoftmax(5, CLASSES, "mean")), {"precision": "fp64"}, plan={"chunk_steps": 3}, keep_state=False)
    # float64, another order of summation
    assert float(trainer.evaluate([packed])) == pytest.approx(float(trainer.evaluate([padded])), rel=1e-12)
