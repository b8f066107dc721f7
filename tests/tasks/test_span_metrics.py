"""F1 of spans: as conlleval counts it, which is written down once more here, and as seqeval does; the same however a part is cut.

Shapes: T time, B lane, N labels.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.data.sequences import UNSEEN, UNSEEN_INSIDE, Sequences
from carrywave.tasks.metrics.spans import TagConfusion

LABELS = ("O", "B-x", "I-x", "E-x", "S-x", "B-y", "I-y", "E-y", "S-y")

sequences = st.lists(st.lists(st.tuples(*[st.integers(0, len(LABELS) - 1)] * 2), min_size=1, max_size=9), min_size=1, max_size=5)


def conlleval(wanted: list[list[str]], found: list[list[str]]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """The script's loop over lines, with its flags: how many chunks of each type are right, wanted and found."""
    right, total_wanted, total_found = Counter[str](), Counter[str](), Counter[str]()

    def parts(label: str) -> tuple[str, str]:
        tag, _, kind = label.partition("-")
        return tag, kind

    def ends(before: tuple[str, str], now: tuple[str, str]) -> bool:
        if (before[0], now[0]) in [("B", "B"), ("B", "O"), ("B", "S"), ("I", "B"), ("I", "O"), ("I", "S")] or before[0] in "ES":
            return True
        return before[0] != "O" and before[1] != now[1]

    def starts(before: tuple[str, str], now: tuple[str, str]) -> bool:
        if now[0] in "BS" or (before[0] in "OES" and now[0] in "EI"):
            return True
        return now[0] != "O" and before[1] != now[1]

    for truth, guess in zip(wanted, found, strict=True):
        in_correct = False
        last_truth = last_guess = ("O", "")
        for one, other in zip([*truth, "O"], [*guess, "O"], strict=True):
            now_truth, now_guess = parts(one), parts(other)
            truth_ends, guess_ends = ends(last_truth, now_truth), ends(last_guess, now_guess)
            if in_correct:
                if truth_ends and guess_ends and last_truth[1] == last_guess[1]:
                    in_correct = False
                    right[last_truth[1]] += 1
                elif truth_ends != guess_ends or now_truth[1] != now_guess[1]:
                    in_correct = False
            truth_starts, guess_starts = starts(last_truth, now_truth), starts(last_guess, now_guess)
            if truth_starts and guess_starts and now_truth[1] == now_guess[1]:
                in_correct = True
            total_wanted[now_truth[1]] += truth_starts
            total_found[now_guess[1]] += guess_starts
            last_truth, last_guess = now_truth, now_guess
    return right, total_wanted, total_found


def data_of(lengths: list[int], resets: np.ndarray[Any, Any] | None = None) -> Sequences:
    sizes = np.array(lengths, np.int64)
    starts = 7 + np.cumsum(sizes) - sizes  # parts share one array of rows, so that one need not begin at 0
    return Sequences(np.zeros(7 + int(sizes.sum())), starts, sizes, resets=resets)


def measured(pairs: list[list[tuple[int, int]]], *, chosen: bool, steps: int, unknown: int | None = None) -> TagConfusion:
    """A part that is read in chunks of so many steps, two lanes at a time; `unknown`: this label is no target."""
    meter = TagConfusion(LABELS, data_of([len(each) for each in pairs]), chosen=chosen)
    longest = max(map(len, pairs))
    target, out = torch.full((longest, len(pairs)), -100), torch.zeros(longest, len(pairs), dtype=torch.int64)
    for lane, each in enumerate(pairs):
        for t, (truth, guess) in enumerate(each):
            target[t, lane], out[t, lane] = -100 if truth == unknown else truth, guess
    given = out if chosen else torch.nn.functional.one_hot(out, len(LABELS)).double()
    for first in range(0, longest, steps):
        for lanes in (slice(low, low + 2) for low in range(0, len(pairs), 2)):
            rows = slice(first, first + steps)
            sequence = torch.arange(len(pairs))[lanes]
            assert meter.fits(given[rows, lanes], target[rows, lanes])
            meter.update(given[rows, lanes], target[rows, lanes], sequence, torch.full_like(sequence, first))
    return meter


def named(pairs: list[list[tuple[int, int]]], side: int) -> list[list[str]]:
    return [[LABELS[pair[side]] for pair in each] for each in pairs]


@given(pairs=sequences, chosen=st.booleans(), steps=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_it_is_conllevals(pairs: list[list[tuple[int, int]]], chosen: bool, steps: int) -> None:
    meter = measured(pairs, chosen=chosen, steps=steps)
    right, wanted, found = conlleval(named(pairs, 0), named(pairs, 1))
    assert meter.counts().tolist() == [[count[kind] for kind in ("x", "y")] for count in (right, wanted, found)]
    values = meter.values()
    total, guessed, met = wanted.total(), found.total(), right.total()
    assert values["span_f1"] == pytest.approx(2 * met / (total + guessed) if total + guessed else 0.0)
    assert values["span_precision"] == pytest.approx(met / guessed if guessed else 0.0)
    assert values["span_recall"] == pytest.approx(met / total if total else 0.0)
    assert [row["type"] for row in meter.rows("type")] == ["x", "y"]
    assert [row["targets"] for row in meter.rows("type")] == [wanted["x"], wanted["y"]]


def test_workers_that_saw_different_lanes_add_up() -> None:
    pairs = [[(1, 1), (2, 2), (0, 1)], [(5, 5), (6, 0)], [(4, 4)]]
    whole = measured(pairs, chosen=True, steps=3)
    parts = []
    for lane in range(3):
        meter = TagConfusion(LABELS, data_of([3, 2, 1]), chosen=True)
        target, out = (torch.tensor([[pair[side]] for pair in pairs[lane]]) for side in (0, 1))
        meter.update(out, target, torch.tensor([lane]), torch.tensor([0]))
        idle = torch.full((2, 1), -100)
        meter.update(idle, idle, torch.tensor([-1]), torch.tensor([0]))
        parts.append(meter)
    for name, tensor in parts[0].tensors().items():
        tensor.copy_(torch.stack([each.tensors()[name] for each in parts]).sum(0))
    assert parts[0].values() == whole.values()
    assert whole.counts().tolist() == [[2, 0], [2, 1], [3, 1]]


def test_a_sequence_that_begins_anew_inside_a_row_ends_what_is_open() -> None:
    tags = torch.tensor([[1], [2], [2]])
    resets = np.zeros(10, np.bool_)
    for resets_at, spans in ((None, 1), (9, 2)):
        if resets_at is not None:
            resets[resets_at] = True
        meter = TagConfusion(LABELS, data_of([3], resets), chosen=True)
        meter.update(tags, tags, torch.tensor([0]), torch.tensor([0]))
        assert meter.counts().tolist() == [[spans, 0]] * 3


def test_spans_of_labels_that_train_does_not_have_are_missed() -> None:
    """As conlleval counts the slots that only the test set of ATIS has."""
    tags = np.array([1, UNSEEN, UNSEEN_INSIDE, 0, UNSEEN, UNSEEN])
    metric = TagConfusion(LABELS, Sequences(tags.astype(np.uint8), np.array([0]), np.array([6]), tags=tags))
    guesses = torch.nn.functional.one_hot(torch.tensor([1, 5, 6, 0, 0, 1]), len(LABELS))[:, None].double()
    metric.update(guesses, torch.from_numpy(tags)[:, None], torch.tensor([0]), torch.tensor([0]))
    found = metric.values()
    assert (found["span_precision"], found["span_recall"]) == (pytest.approx(1 / 3), pytest.approx(1 / 4))
    assert metric.rows("type")[-1] == {"type": "not in train", "precision": 0.0, "recall": 0.0, "f1": 0.0, "targets": 3, "predicted": 0}
