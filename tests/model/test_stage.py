"""Model and stage: chunks equal the whole, fresh lanes start anew, users' modules are checked, regularisation counts real pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.pooled import PooledSoftmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.stage import Chunk, Stage, regularize

DOUBLE = torch.float64
KEY = random.key(8)


def language(**options: Any) -> Model:
    torch.manual_seed(0)
    lstm = LSTM(4, [5, 4], dropout=0.3, weight_drop=0.3, learned_carry=True, **options)
    drops = {"dropout_in": Dropout(0.2), "dropout_out": Dropout(0.4)}
    model = Model(Embedding(11, 4, 0.2), lstm, Softmax(4, 11), **drops)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)
    return model.double()


def classifier(pool: str = "last", bidirectional: bool = False) -> Model:
    torch.manual_seed(0)
    lstm = LSTM(3, 4, 2, dropout=0.3, bidirectional=bidirectional)
    return Model(Numbers(3), lstm, PooledSoftmax(lstm.output_size, 5, pool), dropout_out=nn.Dropout(0.3)).double()


def test_stage_names_its_parameters_as_the_model_does() -> None:
    model = language()
    assert Stage(model).state_dict().keys() == model.state_dict().keys()


class Head(nn.Module):
    """What a user may write: dropout inside, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.net(y)
        return out

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (self(y)[..., 0] - target).square().sum(), torch.tensor(float(target.numel()))


def test_dropout_in_a_users_head_is_keyed() -> None:
    model = Model(nn.Linear(2, 3), LSTM(3, 4), Head()).double()
    stage, state = Stage(model), model.start(3)
    x, target = torch.randn(4, 3, 2, dtype=DOUBLE), torch.randn(4, 3, dtype=DOUBLE)
    chunk = Chunk(key=KEY, lanes=torch.arange(3))
    y, _, state = stage(x, state, chunk)
    first, second = stage.loss(y, state, target, chunk)[0], stage.loss(y, state, target, chunk)[0]
    assert torch.equal(first, second)
    late = Chunk(key=KEY, lanes=torch.arange(3), start=2)
    halves = stage.loss(y[:2], state, target[:2], chunk)[0] + stage.loss(y[2:], state, target[2:], late)[0]
    torch.testing.assert_close(halves, first, rtol=1e-12, atol=0)


class Lossless(nn.Linear):
    pass


class Poolless(Head):
    pooled = True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(nn.Linear(2, 3), LSTM(3, 4), Lossless(4, 1)), "Lossless has no loss"),
        (lambda: Model(nn.Linear(2, 3), LSTM(3, 4), Poolless()), "Poolless has no start"),
        (lambda: Model(nn.Linear(2, 3), nn.LSTM(3, 4), Head()), "got LSTM"),  # type: ignore[arg-type]
        (lambda: Model(nn.Linear(2, 3), LSTM(3, 4, batch_first=True), Head()), "without batch_first"),
        (lambda: Model(nn.Sequential(nn.BatchNorm1d(3)), LSTM(3, 4), Head()), "encoder.0 is a BatchNorm1d"),
        (
            lambda: Model(nn.Linear(2, 3), LSTM(4, 5), Head())(torch.zeros(6, 1, 2)),
            r"Linear gives .* \[6, 1, 3\], but the LSTM reads .*, 4\]",
        ),
        (lambda: Model(nn.GRU(2, 3), LSTM(3, 4), Head())(torch.zeros(6, 1, 2)), r"the encoder GRU gives \(a tensor"),
        (lambda: Model(nn.DataParallel(nn.Linear(2, 3)), LSTM(3, 4), Head()), "Linear is wrapped in DataParallel"),
    ],
)
def test_model_checks_what_it_is_made_of(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_regularisation_by_hand() -> None:
    raw, dropped, before = (torch.randn(*shape, dtype=DOUBLE) for shape in ((4, 2, 3), (4, 2, 3), (2, 3)))
    lengths = [4, 2]
    alpha = sum(float(dropped[t, lane].square().mean()) for lane in range(2) for t in range(lengths[lane]))
    inner = sum(float((raw[t, lane] - raw[t - 1, lane]).square().mean()) for lane in range(2) for t in range(1, lengths[lane]))
    across = sum(float((raw[0, lane] - before[lane]).square().mean()) for lane in range(2))
    given_lengths = torch.tensor(lengths)
    torch.testing.assert_close(regularize(raw, dropped, None, 2.0, 3.0, given_lengths).item(), 2 * alpha + 3 * inner, rtol=1e-12, atol=0)
    torch.testing.assert_close(regularize(raw, dropped, before, 0.0, 3.0, given_lengths).item(), 3 * (inner + across), rtol=1e-12, atol=0)
    whole = regularize(raw, dropped, None, 2.0, 3.0, None)
    cut = regularize(raw[:1], dropped[:1], None, 2.0, 3.0, None) + regularize(raw[1:], dropped[1:], raw[0], 2.0, 3.0, None)
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("cell", [cw.LSTM, cw.GRU, cw.RNN, cw.SLSTM])
def test_a_state_of_other_lanes_is_refused(cell: Any) -> None:
    model = cw.Model(nn.Linear(2, 4), cell(4, 4, 2, kernel="reference"), Softmax(4, 3))
    x = torch.zeros(3, 4, 2)
    for some, others in ((x[:, :1], x), (x, x[:, :1]), (x, x[:, :2])):  # the first of these would be spread over the lanes of the state
        with pytest.raises(
            UserError, match=rf"carry h of layer 0 has shape \[1, {others.shape[1]}, 4\], expected \[1, {some.shape[1]}, 4\]"
        ):
            model(some, model(others)[1])
    with pytest.raises(UserError, match="a model reads padded inputs, not a PackedSequence"):
        model(nn.utils.rnn.pack_sequence([x[:, 0], x[:2, 1]]))


def test_model_output_is_the_heads() -> None:
    model = classifier().eval()
    y, state = model(torch.randn(3, 2, 3, dtype=DOUBLE), lengths=[3, 1])
    assert model.units == 4
    assert torch.equal(model.output(y, state), model.head(state.acc))
    words = language().eval()
    y, state = words(torch.randint(11, (5, 3)))
    assert torch.equal(words.output(y, state), words.head(y))
