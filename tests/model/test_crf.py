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
from carrywave.errors import SpecError, UserError
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.crf import CRF

BIO = ("O", "B-per", "I-per", "B-loc", "I-loc")
BIOES = ("O", "B-x", "I-x", "E-x", "S-x", "B-y", "I-y", "E-y", "S-y")
SGD = {"optimizer": "sgd", "lr": 0.5, "precision": "fp64"}


def test_labels_say_what_they_are() -> None:
    assert [tag_of(label) for label in ("O", "B-per", "L-x", "U-x", "M-x", "I-a-b", "B")] == [
        *(Tag("O"), Tag("B", "per"), Tag("E", "x"), Tag("S", "x"), Tag("I", "x"), Tag("I", "a-b"), Tag("B"))
    ]
    assert [tag_of(label) for label in ("NOUN", "B-", "b-per", "", "O-x", "X-y")] == [None] * 6
    assert tags_of(["E", "I"]) is None  # exons and introns, say
    assert tags_of(["B", "I", "O"]) is not None
    assert tags_of(["O", "B-x", "NOUN"]) is None


def test_the_scheme_follows_from_the_names_unless_it_is_given() -> None:
    assert [scheme_of(labels) for labels in (BIO, BIOES, ("B-x", "L-x", "U-x"), ("NOUN", "VERB"))] == ["bio", "bioes", "bioes", None]
    assert scheme_of(BIO, "none") is None
    assert scheme_of(BIO, "bioes") == "bioes"
    with pytest.raises(SpecError, match=r"data.scheme=bio, but 'NOUN' is not a label of it, as O and B-X are; remove data.scheme"):
        scheme_of(("O", "NOUN"), "bio")
    with pytest.raises(SpecError, match=r"data.scheme=bio, but 'E-x' is not a label of it"):
        scheme_of(BIOES, "bio")


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


def test_a_place_that_breaks_the_scheme_is_found_also_beside_unknown_labels() -> None:
    allowed = Allowed.by("bioes", BIOES)
    number = {label: place for place, label in enumerate(BIOES)} | {"?": -100}
    rows = [number[label] for label in ["O", "B-x", "?", "I-x", "E-x", "I-x", "?", "I-x", "?", "?", "I-y", "E-y", "B-x", "I-y", "?"]]
    starts, lengths = np.array([0, 5, 6, 12]), np.array([5, 0, 6, 3])
    assert allowed.broken(np.array(rows), starts, lengths) == (3, 1, number["B-x"])
    assert allowed.broken(np.array(rows), starts[:3], lengths[:3]) is None
    assert allowed.broken(np.array(rows), np.array([5]), np.array([1])) == (0, 0, -1)
    assert allowed.broken(np.array(rows), np.array([0]), np.array([2])) == (0, 2, number["B-x"])  # it cannot end there


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


def test_without_pairs_the_loss_is_that_of_a_softmax() -> None:
    """At first, when all transitions are alike: in total and in what is counted."""
    head, softmax = CRF(3, 4).double(), Softmax(3, 4).double()
    softmax.load_state_dict({"weight": head.weight, "bias": head.bias})
    y = torch.randn(5, 3, 3, dtype=torch.float64)
    tags, lengths = torch.randint(4, (5, 3)), torch.tensor([5, 2, 0])
    tags[1, 0] = -100
    real = torch.where(torch.arange(5)[:, None] < lengths, tags, -100)
    (total, count), (other, others) = head.loss(y, tags, lengths), softmax.loss(y, real)
    torch.testing.assert_close(total, other, rtol=1e-12, atol=1e-12)
    assert count == others == 6
    torch.testing.assert_close(head(y, lengths)[real >= 0], softmax(y).argmax(-1)[real >= 0])


def test_weights_multiply_sequences_and_their_steps() -> None:
    head = CRF(3, BIO).double()
    y, tags, lengths = torch.randn(4, 3, 3, dtype=torch.float64), torch.tensor([[0, 1, -100]] * 4), torch.tensor([4, 3, 4])
    weights = torch.tensor([2.0, 0.5, 3.0], dtype=torch.float64)
    each = [head.loss(y[:, [lane]], tags[:, [lane]], lengths[[lane]]) for lane in range(3)]
    total, count = head.loss(y, tags, lengths, weights=weights)
    torch.testing.assert_close(total, torch.stack([loss for loss, _ in each]) @ weights, rtol=1e-12, atol=1e-12)
    assert count == 2.0 * 4 + 0.5 * 3
    assert abs(float(each[2][0].detach())) < 1e-12  # nothing is known of it, so nothing is lost


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


def test_mistakes() -> None:
    with pytest.raises(UserError, match="a CRF needs at least one label"):
        CRF(3, 0)
