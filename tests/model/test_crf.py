"""A CRF: labels that the scheme forbids are never predicted and never counted in the loss; micro-batches give the answer of one device.

Shapes: T time, B lane, W width, V labels.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import carrywave as cw
from carrywave.data.text.tag_scheme import Allowed, Tag, scheme_of, tag_of, tags_of
from carrywave.model.heads.crf import CRF

BIO = ("O", "B-per", "I-per", "B-loc", "I-loc")
BIOES = ("O", "B-x", "I-x", "E-x", "S-x", "B-y", "I-y", "E-y", "S-y")


def test_labels_say_what_they_are() -> None:
    assert [tag_of(label) for label in ("O", "B-per", "L-x", "U-x", "M-x", "I-a-b", "B")] == [
        *(Tag("O"), Tag("B", "per"), Tag("E", "x"), Tag("S", "x"), Tag("I", "x"), Tag("I", "a-b"), Tag("B"))
    ]
    assert [tag_of(label) for label in ("NOUN", "B-", "b-per", "", "O-x", "X-y")] == [None] * 6
    assert tags_of(["E", "I"]) is None  # exons and introns, say
    assert tags_of(["B", "I", "O"]) is not None
    assert tags_of(["O", "B-x", "NOUN"]) is None


@pytest.mark.parametrize(
    ("labels", "right", "wrong"),
    [
        (BIO, ["O O", "B-per I-per I-per", "B-per B-loc"], ["I-per", "O I-loc", "B-per I-loc", "B-loc O I-loc"]),
        (BIOES, ["S-x O B-x I-x E-x", "B-x E-x B-y E-y"], ["B-x", "B-x O", "E-x", "B-x I-y", "B-x I-x", "S-x E-x"]),
    ],
    ids=["bio", "bioes"],
)
def test_what_a_scheme_allows(labels: tuple[str, ...], right: list[str], wrong: list[str]) -> None:
    allowed = Allowed.by(scheme_of(labels), labels)

    def broken(text: str) -> bool:
        tags = np.array([labels.index(label) for label in text.split()])
        return allowed.broken(tags, np.array([0]), np.array([len(tags)])) is not None

    assert [broken(text) for text in right] == [False] * len(right)
    assert [broken(text) for text in wrong] == [True] * len(wrong)
    assert Allowed.by(None, labels).everything


@given(seed=st.integers(0, 2**31), lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("labels", [BIO, BIOES], ids=["bio", "bioes"])
def test_what_is_predicted_obeys_the_scheme(labels: tuple[str, ...], seed: int, lengths: list[int]) -> None:
    torch.manual_seed(seed)
    head = CRF(3, labels).double()
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=3.0)
    steps = max(*lengths, 1)
    y, lengths_B = torch.randn(steps, len(lengths), 3, dtype=torch.float64), torch.tensor(lengths)
    found = head(y, lengths_B)
    starts = np.arange(len(lengths)) * steps
    assert Allowed.by(head.scheme, labels).broken(found.T.reshape(-1).numpy(), starts, np.array(lengths)) is None
    total, count = head.loss(y, found, lengths_B)  # what is predicted can be learned
    assert torch.isfinite(total)
    assert count == sum(lengths)


def test_forbidden_transitions_have_no_share_in_the_loss_and_no_gradient() -> None:
    head = CRF(3, BIO).double()
    y, tags, lengths = torch.randn(4, 2, 3, dtype=torch.float64), torch.tensor([[0, 1]] * 4), torch.tensor([4, 3])
    before, _ = head.loss(y, tags, lengths)
    gradients = torch.autograd.grad(before, [head.start, head.transitions, head.end])
    for gradient, allowed in zip(gradients, Allowed.by("bio", BIO), strict=True):
        assert not gradient[~torch.from_numpy(allowed)].any()
        assert gradient[torch.from_numpy(allowed)].all()
    with torch.no_grad():
        head.transitions[~torch.from_numpy(Allowed.by("bio", BIO).pairs_NN)] = 9.0
    assert torch.equal(head.loss(y, tags, lengths)[0], before)


def model() -> cw.Model:
    torch.manual_seed(0)
    return cw.Model(nn.Linear(2, 3), cw.LSTM(3, 4, 2, dropout=0.2, bidirectional=True), CRF(8, BIO)).double()


def test_it_learns_sequences_that_single_steps_do_not_show() -> None:
    """Spans of two steps that begin anywhere: the inputs say where, and only the step before tells a beginning from an end."""
    torch.manual_seed(0)
    own = cw.Model(nn.Linear(1, 4), cw.LSTM(4, 8, bidirectional=True), CRF(16, ("O", "B", "I"))).double()
    trainer = cw.Trainer(own, {"optimizer": "adam", "lr": 0.03, "precision": "fp64"})
    x = (torch.rand(12, 16, 1) < 0.3).double()
    tags = torch.zeros(12, 16, dtype=torch.int64)
    for lane in range(16):
        for t in range(11):
            if x[t, lane] and tags[t, lane] == 0:
                tags[t, lane], tags[t + 1, lane] = 1, 2
    given = cw.Batch.of(x, tags, torch.full((16,), 12))
    losses = [float(trainer.step(given)) for _ in range(80)]
    assert losses[-1] < 0.2 * losses[0]
    own.eval()
    y, state = own(x)
    found = own.output(y, state)
    assert (found == tags).double().mean() > 0.9
    assert all(int(two) != 2 or int(one) > 0 for lane in found.T for one, two in pairwise(lane))
