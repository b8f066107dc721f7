"""Encoders: tokens to vectors, with whole words dropped by key; numbers as they are."""

from __future__ import annotations

import pytest
import torch

from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.model.encoders import Embedding, Numbers


def test_words_are_dropped_by_row_wherever_they_stand() -> None:
    encoder = Embedding(50, 3, dropout_words=0.5, dtype=torch.float64)
    tokens = torch.randint(50, (30, 4), generator=torch.Generator().manual_seed(0))
    with random.Scope(random.key(1), torch.arange(4), 0):
        whole = encoder(tokens)
    with random.Scope(random.key(1), torch.arange(2, 4), 10):
        assert torch.equal(encoder(tokens[10:, 2:]), whole[10:, 2:])
    kept = {int(token): bool(vector.any()) for token, vector in zip(tokens.flatten(), whole.flatten(0, 1), strict=True)}
    for token, vector in zip(tokens.flatten(), whole.flatten(0, 1), strict=True):
        expected = encoder.weight[token] * 2.0 if kept[int(token)] else torch.zeros(3)
        assert torch.equal(vector, expected.to(vector.dtype))
    assert set(kept.values()) == {True, False}
    assert torch.equal(encoder.eval()(tokens), encoder.weight[tokens])


def test_numbers_pass_and_are_counted() -> None:
    x = torch.randn(2, 3, 4)
    assert Numbers(4)(x) is x
    with pytest.raises(UserError, match="a step has 4 features, but the model reads 5"):
        Numbers(5)(x)
