"""Rows of a vocabulary on one worker: the parts of a softmax, block by block, and what is refused. Several workers: tests/distributed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from carrywave.errors import PlanError, UserError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.scoring import IGNORED
from carrywave.model.initialization import initialize
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.vocabulary import rows as vocabulary_rows
from carrywave.model.vocabulary.rows import Rows, sharing
from carrywave.model.vocabulary.split import check_modules, count_parameters, join_vocabulary, split_rows, split_vocabulary

WORDS, WIDTH, STEPS, LANES = 11, 4, 5, 3


class Alone:
    """One worker that shares its vocabulary with nobody."""

    index, of = 0, 1

    def gather(self, own: Tensor) -> Tensor:
        return own[None].clone()

    def scatter_sum(self, parts: Tensor) -> Tensor:
        return parts[0].clone()

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def maximum_(self, tensor: Tensor) -> Tensor:
        return tensor


def a_model(*, tie: bool = False, head: Callable[[Embedding], nn.Module] | None = None) -> Model:
    encoder = Embedding(WORDS, WIDTH)
    made = Softmax(WIDTH, WORDS, tied=encoder.weight if tie else None) if head is None else head(encoder)
    model = Model(encoder, LSTM(WIDTH, WIDTH), made)
    initialize(model, 3)
    return model


@pytest.mark.parametrize(("words", "workers"), [(7, 3), (8, 4), (5, 5)])
def test_every_row_is_held_once(words: int, workers: int) -> None:
    held = [row for index in range(workers) for row in range(*_bounds(Rows.of_worker(words, index, workers)))]
    assert held == list(range(words))


def _bounds(rows: Rows) -> tuple[int, int]:
    return rows.low, rows.high


@pytest.mark.parametrize("at_once", [1, 2 * WORDS, 1 << 24])
@pytest.mark.parametrize("most", [LANES, LANES + 2])
def test_cross_entropy_in_blocks_is_that_of_torch(monkeypatch: pytest.MonkeyPatch, at_once: int, most: int) -> None:
    """Targets that do not count, lanes that others have more of, and logits so large that their exponentials overflow."""
    monkeypatch.setattr(vocabulary_rows, "LOGITS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    y, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((STEPS, LANES, WIDTH), (WORDS, WIDTH), WORDS)
    )
    y *= 400.0
    target = torch.randint(WORDS, (STEPS, LANES), generator=generator)
    target[2, 1] = target[4, 0] = IGNORED
    given = [tensor.clone().requires_grad_() for tensor in (y, weight, bias)]
    with sharing(most):
        loss, count = vocabulary_rows.summed_cross_entropy(given[0], given[1], given[2], target, IGNORED, Rows(0, WORDS, WORDS, Alone()))
    (3.0 * loss).backward()
    wanted = [tensor.clone().requires_grad_() for tensor in (y, weight, bias)]
    logits = functional.linear(*wanted).flatten(0, 1)
    expected = functional.cross_entropy(logits, target.flatten(), ignore_index=IGNORED, reduction="sum")
    (3.0 * expected).backward()
    assert count == STEPS * LANES - 2
    # Sums of some dozen terms in another order, relative to logits of about a thousand.
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    for ours, theirs in zip(given, wanted, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_logits_are_those_of_the_whole_softmax_and_have_no_gradient() -> None:
    model, y = a_model(), torch.randn(STEPS, LANES, WIDTH)
    wanted = model.head(y)
    split_vocabulary(model, Alone())
    with sharing(LANES + 1), torch.no_grad():
        torch.testing.assert_close(model.head(y), wanted)
    with sharing(LANES + 1), pytest.raises(UserError, match="have no gradient; call the head's loss"):
        model.head(y)


@pytest.mark.parametrize("tie", [False, True])
def test_a_worker_draws_the_rows_that_it_holds(tie: bool) -> None:
    """The same bits as in the whole model, which it never has."""
    whole = dict(a_model(tie=tie).named_parameters())
    for index in range(3):
        rows = Rows.of_worker(WORDS, index, 3)
        encoder = Embedding(WORDS, WIDTH, rows=rows)
        part = Model(encoder, LSTM(WIDTH, WIDTH), Softmax(WIDTH, WORDS, tied=encoder.weight if tie else None, rows=rows))
        initialize(part, 3)
        assert count_parameters(part) == sum(tensor.numel() for tensor in whole.values())
        assert split_rows(part).keys() == {"encoder.weight", "head.bias"} | ({"head.weight"} if not tie else set())
        for name, tensor in part.named_parameters():
            assert torch.equal(tensor, whole[name][slice(*_bounds(rows))] if name in split_rows(part) else whole[name]), name


def test_split_and_joined_again_a_model_is_what_it_was() -> None:
    model = a_model(tie=True)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    kept = model.encoder.weight

    class Second(Alone):
        index, of = 1, 3

    split_vocabulary(model, Second())
    assert model.encoder.weight is kept is model.head.weight  # a user's optimizer may hold it
    assert kept.shape == (4, WIDTH)
    assert torch.equal(kept, before["encoder.weight"][3:7])
    with pytest.raises(
        UserError, match=r"encoder.weight is split over workers, so this state_dict would save only rows 3 to 6; call trainer"
    ):
        model.state_dict()
    with pytest.raises(UserError, match=r"runs only on all of them together; call trainer.evaluate"):
        model(torch.zeros(STEPS, LANES, dtype=torch.int64))
    join_vocabulary(model, before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if name in before)


class Reads(nn.Module):
    """A head of the user's own that reads the embedding."""

    def __init__(self, encoder: Embedding) -> None:
        super().__init__()
        self.matrix = encoder.weight

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return functional.linear(y, self.matrix).sum(), torch.ones(())


def test_modules_that_need_the_whole_matrix_are_refused() -> None:
    with pytest.raises(PlanError, match=r"head \(Reads\) reads the embedding's whole matrix, .*; use carrywave's Softmax"):
        check_modules(a_model(head=Reads))
    weighted = a_model(head=lambda encoder: Softmax(WIDTH, WORDS, tied=encoder.weight, weights=torch.ones(WORDS)))
    with pytest.raises(PlanError, match=r"head \(Softmax\) reads .* without class weights"):
        check_modules(weighted)
    own = Model(nn.Embedding(WORDS, WIDTH), LSTM(WIDTH, WIDTH), Softmax(WIDTH, WORDS))
    with pytest.raises(PlanError, match=r"needs carrywave's Embedding as the encoder, but this model has Embedding of torch; remove"):
        check_modules(own)
    assert check_modules(a_model(tie=True)) == WORDS
