"""Scores of words: which features have rows, that padding and neighbours beyond the ends have none, and that they are learned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.data.text import spelling
from carrywave.data.text.spelling import Spelling
from carrywave.errors import UserError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.word_scores import WordScores
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.vocabulary.spelled_words import SpelledWords
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.trainer import Trainer

SENTENCE = ["In", "Boston", "in", "1987", "IBM", "sold", "anaesthesia"]
CHARACTERS, LENGTH = spelling.learn([*SENTENCE, "BOSTON", "boston", "Austen", "2024", "HP", "x.y"], 8)
SPELLED = Spelling(CHARACTERS, LENGTH)
WORD, CASED, SHAPE, BEGINNINGS, ENDINGS, NEIGHBOURS = 0, 1, 2, range(3, 7), range(7, 11), range(11, 24)


def scores(rows: int = 1 << 18) -> WordScores:
    return WordScores(rows, 3, CHARACTERS, spelling.FIRST + len(CHARACTERS), LENGTH)


def codes(*sentences: list[str]) -> Tensor:
    """[T, B, L], with 1 in padding, whatever that stands for."""
    found = torch.ones(max(map(len, sentences)), len(sentences), LENGTH, dtype=torch.int64)
    for lane, words in enumerate(sentences):
        found[: len(words), lane] = torch.from_numpy(SPELLED.codes(words))
    return found


def rows(*sentences: list[str]) -> Tensor:
    return scores().rows(codes(*sentences), torch.tensor([len(words) for words in sentences]))


def equal(one: str, other: str) -> set[int]:
    """The features of a word by itself that two words share."""
    found = rows([one], [other])
    return set((found[0, 0, :11] == found[0, 1, :11]).nonzero().flatten().tolist())


def test_neighbours_are_those_of_the_sentence() -> None:
    """What stands after the end of a lane changes nothing, and a word knows that it is the first or the last."""
    whole = rows(SENTENCE, SENTENCE[:3])
    alone = rows(SENTENCE[:3])
    assert torch.equal(whole[:3, 1], alone[:, 0])
    assert not torch.equal(whole[2, 0, list(NEIGHBOURS)], whole[2, 1, list(NEIGHBOURS)])
    assert torch.equal(whole[:1, 0], whole[:1, 1])  # two words on both sides are the same
    assert not torch.equal(rows(["in", "in"])[0, 0], rows(["in", "in"])[1, 0])


def test_scores_are_sums_of_rows_and_half_are_left_out_in_training() -> None:
    table = scores()
    with torch.no_grad():
        table.table.fill_(1.0)
    given = codes(SENTENCE), torch.tensor([len(SENTENCE)])
    assert torch.equal(table.eval()(*given), torch.full((7, 1, 3), 24.0))
    kept = table.train()(*given).detach()
    assert 0.5 < float(kept.mean()) / 24 < 1.5  # of 168 features, each counts 0 or 2
    assert len(kept.unique()) > 1


def test_they_alone_learn_labels_that_layers_do_not_see() -> None:
    """The layers read nothing: all words are the same to them."""
    torch.manual_seed(1)
    encoder = SpelledWords(Embedding(2, 2), spelling.FIRST + len(CHARACTERS), LENGTH, 2, 2)
    model = Model(encoder, LSTM(4, 4), CRF(4, ("O", "B-x", "I-x"), words=scores(1 << 10)))
    for parameter in encoder.parameters():
        parameter.data.zero_().requires_grad_(False)
    letters = codes(SENTENCE, SENTENCE[::-1])
    inputs = torch.cat([torch.zeros(7, 2, 1, dtype=torch.int64), letters], dim=-1)
    tags = torch.tensor([0, 1, 0, 0, 1, 0, 0])
    batch = Batch.of(inputs, torch.stack([tags, tags.flip(0)], 1), history=letters)
    trainer = Trainer(model, TrainSpec(lr=0.1, optimizer="adam", precision="fp32"))
    for _ in range(30):
        trainer.step(batch)
    y, state = model.eval()(inputs)
    assert torch.equal(model.output(y, state, past=letters[..., None])[:, 0], tags)
    with pytest.raises(UserError, match="the head reads the last 1 values at every step, but the history of the batch has 0 rows"):
        trainer.step(Batch.of(inputs, torch.stack([tags, tags], 1)))
