"""Words with their characters: each against a plain reference in float64, wherever a word stands and whatever stands beside it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from carrywave.kernels import random
from carrywave.model.encoders import Embedding
from carrywave.model.initialization import initialize
from carrywave.model.vocabulary.spelled_words import SpelledWords, token_embedding

CODES, LENGTH = 8, 5
CLOSE = 1e-12  # a few dozen terms of order one in float64


def encoder_of() -> SpelledWords:
    encoder = SpelledWords(Embedding(6, 3), CODES, LENGTH, 4, 6).double()
    initialize(encoder, 3)
    return encoder


def convolved(encoder: SpelledWords, codes: list[int]) -> Tensor:
    """By a loop over the places of one word."""
    if not codes:
        return torch.zeros(6, dtype=torch.float64)
    rows = encoder.characters[torch.tensor([0, *codes, 0])]
    return torch.stack([encoder.reader(rows[at : at + 3].flatten()) for at in range(len(codes))]).max(0).values


words = st.lists(st.integers(1, CODES - 1), max_size=LENGTH)


@settings(max_examples=15, deadline=None)
@given(spelled=st.lists(words, min_size=1, max_size=6))
def test_a_word_is_read_as_if_it_were_alone(spelled: list[list[int]]) -> None:
    encoder = encoder_of()
    rows = [[number % 6, *codes, *[0] * (LENGTH - len(codes))] for number, codes in enumerate(spelled)]
    x = torch.tensor(rows)[:, None]
    weights = [p for p in encoder.parameters() if p is not encoder.words.weight]
    wanted = torch.stack([torch.cat([encoder.words.weight[number % 6], convolved(encoder, codes)]) for number, codes in enumerate(spelled)])
    factor = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slopes = torch.autograd.grad((wanted * factor).sum(), [encoder.words.weight, *weights], allow_unused=True)
    got = encoder(x)[:, 0]
    assert torch.allclose(got, wanted, rtol=0, atol=CLOSE)
    ours = torch.autograd.grad((got * factor).sum(), [encoder.words.weight, *weights], allow_unused=True)
    for our, slope in zip(ours, slopes, strict=True):
        none = torch.zeros(1, dtype=torch.float64)
        assert torch.allclose(none if our is None else our, none if slope is None else slope, rtol=0, atol=CLOSE)


def test_an_unknown_character_begins_at_zero_and_the_embedding_is_found() -> None:
    encoder = encoder_of()
    assert not encoder.characters[1].any()
    assert encoder.characters[0].any()
    assert encoder.width == 9
    assert token_embedding(encoder) is encoder.words
    assert token_embedding(nn.Linear(2, 2)) is None


def test_rare_words_are_read_as_the_unknown_one_in_training_alone() -> None:
    encoder = Embedding(100, 3)
    encoder.rare = (40, 99, 0.5)
    tokens = torch.arange(99)[:, None]
    with random.Scope(random.key(1), torch.arange(1), 0):
        got = encoder(tokens)[:, 0]
    hidden = (got == encoder.weight[99]).all(-1)
    assert not hidden[:40].any()
    assert 15 < int(hidden[40:].sum()) < 45  # of 59, half
    assert torch.equal(got[~hidden], encoder.weight[:99][~hidden])
    assert torch.equal(encoder.eval()(tokens)[:, 0], encoder.weight[:99])
