"""Layers from elsewhere: found in a state dict whatever their name, checked against the model, and copied as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import carrywave as cw
from carrywave.errors import DataError
from carrywave.model.pretrained.layers import holds_layers, load_lstm, read_lstm


def test_the_only_lstm_of_a_model_is_found_whatever_its_name(tmp_path: Path) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)
            self.reader = nn.LSTM(4, 6, 2, bidirectional=True)
            self.out = nn.Linear(12, 2)

    theirs, ours = Tagger(), cw.LSTM(4, 6, num_layers=2, bidirectional=True)
    save_file(theirs.state_dict(), tmp_path / "tagger.safetensors")
    load_lstm(ours, read_lstm(tmp_path / "tagger.safetensors"))
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(ours(x)[0], theirs.reader(x)[0], rtol=1e-5, atol=1e-6)  # float32, other kernels


def test_numbered_lstms_are_one_stack() -> None:
    stack = nn.ModuleList(nn.LSTM(size, width) for size, width in ((4, 5), *[(5, 5)] * 9, (5, 7)))
    ours = cw.LSTM(4, [5] * 10 + [7])
    load_lstm(ours, nn.ModuleDict({"lstm": stack}).state_dict())
    x = torch.randn(5, 3, 4)
    expected = x
    for each in stack:
        expected = each(expected)[0]
    torch.testing.assert_close(ours(x)[0], expected, rtol=1e-5, atol=1e-6)


def test_layers_without_biases_get_zeros() -> None:
    theirs, ours = nn.LSTM(3, 4, bias=False), cw.LSTM(3, 4)
    load_lstm(ours, theirs.state_dict())
    assert not ours.bias_ih_l0.any()
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (nn.LSTM(3, 8, 2), r"but the model .*; it needs model.layers=2, model.hidden=8, 3 inputs \(model.embedding for tokens\)$"),
        (nn.LSTM(3, 4, bidirectional=True), "but the model no .*_reverse; it needs .*, model.bidirectional=true"),
        (nn.LSTM(3, 4, proj_size=2), "model.projection=2"),
        (nn.GRU(3, 4), "has layers of 3 gates, but the cell lstm has 4; use weights of that cell"),
        (nn.Linear(3, 4), "holds no recurrent layers: it has no weight_ih_l0; save the state_dict of a torch.nn.LSTM or nn.GRU"),
        (
            nn.ModuleDict({"a": nn.LSTM(3, 4), "b": nn.LSTM(3, 4)}),
            r"holds several stacks of layers \(a\., b\.\); save one of them by itself",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(theirs: nn.Module, said: str) -> None:
    ours = cw.LSTM(3, 4)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with pytest.raises(DataError, match=said):
        load_lstm(ours, theirs.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_files_are_told_by_their_names(tmp_path: Path) -> None:
    assert [holds_layers(name) for name in ("a.safetensors", "A.SAFETENSORS", "glove.txt", "glove.txt.gz")] == [True, True, False, False]
    with pytest.raises(DataError, match=r"none.safetensors: file not found; pass a .safetensors file"):
        read_lstm(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="is not a valid safetensors file"):
        read_lstm(tmp_path / "bad.safetensors")
