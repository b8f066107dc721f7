"""Initial weights: a function of seed and name, with the bounds and the structure that were asked for."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.initialization import initialize
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model


def model(**options: bool) -> Model:
    encoder = Embedding(40, 6)
    return Model(encoder, LSTM(6, [8, 6], **options), Softmax(6, 40))  # type: ignore[arg-type]


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_same_seed_same_weights_whatever_was_there() -> None:
    first, second, other = model(), model(), model()
    assert initialize(first, 2**63 - 1) == ()
    initialize(second, 2**63 - 1)
    initialize(other, 1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.encoder.weight, other.encoder.weight)  # type: ignore[arg-type]


def test_weights_depend_on_the_name_and_not_on_what_else_there_is() -> None:
    small, large = LSTM(6, 8), LSTM(6, 8, 2)
    initialize(small, 5)
    initialize(large, 5)
    for name, value in values(small).items():
        assert torch.equal(value, values(large)[name])
    assert not torch.equal(values(large)["bias_ih_l0"], values(large)["bias_hh_l0"])
    net = model()
    initialize(net, 5)
    assert not torch.equal(values(net)["encoder.weight"], values(net)["head.weight"])


def test_other_modules_of_a_user() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(9, 5), nn.LayerNorm(5), nn.Conv1d(4, 5, 3))
            self.words = nn.Embedding(30, 50, padding_idx=0)
            self.free = nn.Parameter(torch.full((3,), 7.0))

    own = Own()
    nn.init.constant_(own.net[1].weight, 9.0)
    assert initialize(own, 1) == ("free",)
    found = values(own)
    assert found["free"].tolist() == [7.0] * 3
    assert found["net.0.weight"].abs().max() <= 1 / 3
    assert found["net.0.bias"].abs().max() <= 1 / 3
    assert found["net.2.weight"].abs().max() <= 1 / math.sqrt(12)
    assert found["net.1.weight"].tolist() == [1.0] * 5
    assert found["net.1.bias"].tolist() == [0.0] * 5
    assert abs(found["words.weight"].std().item() - 1) < 0.1
    assert not found["words.weight"][0].any()


def test_orthogonal_blocks() -> None:
    net = LSTM(6, 8, proj_size=5, bidirectional=True, dtype=torch.float64)
    initialize(net, 1, init="orthogonal", forget_bias=1.0)
    found = values(net)
    for suffix in ("_l0", "_l0_reverse"):
        for block in found[f"weight_hh{suffix}"].chunk(4):
            torch.testing.assert_close(block.t() @ block, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-13)
        assert found[f"weight_ih{suffix}"].abs().max() <= math.sqrt(6 / (8 + 6))
        assert found[f"bias_ih{suffix}"].tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
        assert not found[f"bias_hh{suffix}"].any()
    assert not torch.equal(found["weight_hh_l0"], found["weight_hh_l0_reverse"])


def test_xavier_and_forget_bias() -> None:
    net = LSTM(6, 8, learned_carry=True, layer_norm=True)
    nn.init.ones_(net.get_parameter("carry_h_l0"))
    initialize(net, 1, init="xavier")
    found = values(net)
    for name, bound in (("weight_ih_l0", math.sqrt(6 / 14)), ("weight_hh_l0", math.sqrt(6 / 16))):
        assert 0.9 * bound < found[name].abs().max() <= bound
    assert not found["carry_h_l0"].any()
    assert found["norm_l0.weight"].tolist() == [1.0] * 8
    initialize(net, 1, forget_bias=2.0)
    found = values(net)
    assert found["bias_ih_l0"][8:16].tolist() == [2.0] * 8
    assert not found["bias_hh_l0"][8:16].any()
    assert found["bias_hh_l0"][:8].all()


def test_tied_matrix_is_set_once_under_its_first_name() -> None:
    encoder = Embedding(40, 6)
    tied = Model(encoder, LSTM(6, 6), Softmax(6, 40, tied=encoder.weight))
    apart = Model(Embedding(40, 6), LSTM(6, 6), Softmax(6, 40))
    initialize(tied, 4)
    initialize(apart, 4, init_scale=0.1)
    assert torch.equal(encoder.weight, apart.encoder.weight)  # type: ignore[arg-type]
    assert apart.head.weight.abs().max() <= 0.1  # type: ignore[operator]
