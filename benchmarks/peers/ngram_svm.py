"""The peer of texts in `quality`: a linear support vector machine on words and pairs of words, as scikit-learn has it."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def there() -> bool:
    """Whether scikit-learn is installed."""
    return find_spec("sklearn") is not None


def accuracy(train: Path, test: Path) -> float:
    """The share of the lines of test whose label it finds."""
    text: Any = importlib.import_module("sklearn.feature_extraction.text")
    svm: Any = importlib.import_module("sklearn.svm")
    parts = [[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in (train, test)]
    features = text.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    rows = [features.fit_transform(row["text"] for row in parts[0]), features.transform(row["text"] for row in parts[1])]
    found = svm.LinearSVC().fit(rows[0], [row["label"] for row in parts[0]]).predict(rows[1])
    return float((found == [row["label"] for row in parts[1]]).mean())
