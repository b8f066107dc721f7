"""What scikit-learn asks of an estimator's constructor holds for `cw.Forecaster`, and skorch trains and scores a module with `cw.LSTM`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import carrywave as cw

sklearn = pytest.importorskip("sklearn")


def test_a_forecaster_is_cloned() -> None:
    from sklearn.base import clone

    given = cw.Forecaster(6, season=3, model={"hidden": 4}, train={"epochs": 1})
    copy = clone(given)
    assert copy is not given
    assert copy.get_params() == given.get_params()


@pytest.mark.filterwarnings("ignore:.*recommended to delay")  # it suggests that a mistake be told in fit; ours is told at once
@pytest.mark.parametrize("check", ["check_get_params_invariance", "check_set_params"])
def test_its_parameters(check: str) -> None:
    from sklearn.utils import estimator_checks

    getattr(estimator_checks, check)("Forecaster", cw.Forecaster())


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = cw.LSTM(1, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return torch.softmax(self.out(y[:, -1]), dim=-1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_cross_validation_with_skorch() -> None:
    skorch = pytest.importorskip("skorch")
    from sklearn.model_selection import cross_val_score

    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(60, 12, 1)).astype(np.float32)
    labels = (x.mean((1, 2)) > 0).astype(np.int64)
    net = skorch.NeuralNetClassifier(Classifier, max_epochs=30, lr=0.05, optimizer=torch.optim.Adam, verbose=0, train_split=None)
    assert cross_val_score(net, x, labels, cv=3, scoring="accuracy").mean() > 0.8
