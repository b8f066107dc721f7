"""What a worker keeps of a model on stages, and what it says of the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import carrywave as cw
from carrywave.errors import UserError
from carrywave.model.heads.classes import Softmax
from carrywave.model.parameter_placement import Holding, Released, hold


def made() -> cw.Model:
    return cw.Model(nn.Linear(3, 4), cw.LSTM(4, 4, num_layers=2), Softmax(4, 2))


def test_an_average_of_the_whole_model_learns_that_a_stage_holds_a_part() -> None:
    """One made from what the stage holds averages that."""
    model = made()
    whole = AveragedModel(model)
    hold(model, Holding(0, 2, torch.device("cpu")), torch.float32)
    assert isinstance(model.head.weight, Released)
    with pytest.raises(UserError, match=r"no values here; make a copy of the model, such as torch's AveragedModel, after the Trainer"):
        whole.update_parameters(model)
    own = AveragedModel(model)
    for _ in range(2):
        own.update_parameters(model)
    torch.testing.assert_close(own.module.encoder.weight, model.encoder.weight)


def test_what_is_released_stays_a_parameter() -> None:
    model = made()
    model.head.weight.requires_grad_(False)
    hold(model, Holding(0, 2, torch.device("cpu")), torch.float32)
    for net in (model, copy.deepcopy(model)):
        weight = net.head.weight
        assert isinstance(weight, nn.Parameter)
        assert (weight.is_meta, weight.requires_grad, list(weight.shape)) == (True, False, [2, 4])
