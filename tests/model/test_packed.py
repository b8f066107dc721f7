"""PackedSequence beside nn.LSTM in float64: outputs packed like the input, carries in the order before packing, gradients; and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import carrywave as cw
from carrywave.errors import UserError

CLOSE = {"rtol": 1e-12, "atol": 1e-14}  # float64, in another order


@pytest.mark.parametrize("ordered", [True, False], ids=["sorted", "not sorted"])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"bidirectional": True, "num_layers": 2}, {"proj_size": 3, "bidirectional": True, "bias": False}],
    ids=str,
)
def test_beside_nn_lstm(options: dict[str, Any], ordered: bool) -> None:
    torch.manual_seed(0)
    theirs, ours = nn.LSTM(2, 5, **options).double(), cw.LSTM(2, 5, **options).double()
    ours.load_state_dict(theirs.state_dict())
    lengths = [6, 4, 4, 1] if ordered else [1, 6, 4, 4]
    x = torch.randn(6, 4, 2, dtype=torch.float64)
    given, found = [], []
    carry = tuple(torch.randn_like(part) for part in theirs(x.transpose(0, 1) if options.get("batch_first") else x)[1])
    for lstm in (theirs, ours):
        leaf, start = x.clone().requires_grad_(), tuple(part.detach().clone().requires_grad_() for part in carry)
        y, (h, c) = lstm(pack_padded_sequence(leaf, lengths, enforce_sorted=ordered), start)
        assert isinstance(y, PackedSequence)
        (y.data.sin().sum() + h.cos().sum() + c.square().sum()).backward()
        given.append(y)
        found.append([y.data, h, c, leaf.grad, *(part.grad for part in start), *(p.grad for p in lstm.parameters())])
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        one, other = (getattr(each, name) for each in given)
        assert (one is None and other is None) or torch.equal(one, other)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, **CLOSE)
    torch.testing.assert_close(pad_packed_sequence(given[1])[0], pad_packed_sequence(given[0])[0], **CLOSE)


def test_a_batch_of_packed_sequences() -> None:
    x, target = torch.randn(4, 3, 2), torch.randint(0, 5, (4, 3))
    lengths = [2, 4, 3]
    packed = [pack_padded_sequence(each, lengths, enforce_sorted=False) for each in (x, target)]
    wanted = cw.Batch.of(x, target, lengths)
    for batch in (cw.Batch.of(*packed), cw.Batch.of(packed[0], target)):
        assert batch.targets is not None
        assert wanted.targets is not None
        assert torch.equal(batch.inputs, wanted.inputs)
        assert torch.equal(batch.targets, wanted.targets)
        assert torch.equal(batch.lengths, wanted.lengths)
        assert batch.real == 9
    labels = torch.tensor([1, 0, 1])
    assert torch.equal(cw.Batch.of(packed[0], labels).targets, labels)
    with pytest.raises(UserError, match="has its own lengths; pack the inputs, or both alike, and remove lengths"):
        cw.Batch.of(packed[0], target, lengths)
    with pytest.raises(UserError, match="has its own lengths; pack the inputs, or both alike"):
        cw.Batch.of(x, packed[1])
    other = pack_padded_sequence(target, [4, 3, 2])
    with pytest.raises(UserError, match=r"packed with lengths \[4, 3, 2\], the inputs with \[2, 4, 3\]; pack both alike"):
        cw.Batch.of(packed[0], other)
