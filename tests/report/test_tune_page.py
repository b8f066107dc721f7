"""The page of a search: what it shows of keys that are numbers, orders of magnitude, or neither."""

from __future__ import annotations

import re

from carrywave.report.tune_page import render_search

ROWS = [
    {"trial": 1, "train.lr": 0.001, "a": "<b>", "n": 1, "loss": 2.0, "epochs": 3, "seconds": 7, "state": "finished"},
    {"trial": 2, "train.lr": 0.1, "a": [1, 2], "n": 3, "loss": 1.5, "epochs": 3, "seconds": 90, "state": "pruned"},
    {"trial": 3, "train.lr": 0.01, "a": None, "n": 2, "loss": 1.25, "epochs": 3, "seconds": 8, "state": "finished"},
    {"trial": 4, "train.lr": 0.02, "a": None, "n": 2, "loss": None, "epochs": 0, "seconds": 1, "state": "failed", "why": "<it> broke"},
]


def test_every_key_has_a_picture_and_every_trial_a_row() -> None:
    page = render_search("runs/<search>", "loss", ["train.lr", "a", "n"], ROWS, 3, higher=False)
    assert page.count("<svg") == 3  # by trial, and by each key that is a number
    assert page.count('<circle class="dot c0"') == 3 * 3  # of the trials that have a value
    assert "<b>" not in page
    assert "<search>" not in page
    assert "&lt;it&gt; broke" in page
    assert "2 finished, 1 pruned, 1 failed" in page
    assert re.findall(r'<th scope="row">(\d)', page) == ["3", "2", "1", "4"]


def test_higher_is_better_where_it_is() -> None:
    rows = [{**row, "accuracy": row["loss"]} for row in ROWS]
    page = render_search("s", "accuracy", ["n"], rows, 1, higher=True)
    assert "200.00%" in page
    assert re.findall(r'<th scope="row">(\d)', page) == ["1", "2", "3", "4"]


def test_one_trial_is_a_page_too() -> None:
    assert render_search("s", "loss", ["n"], ROWS[:1], 1, higher=False).count("<svg") == 2
