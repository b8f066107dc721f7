"""Our own warnings are one line on the command line; those of other libraries keep their form."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import carrywave
from carrywave.cli.options import plain_warnings


def test_ours_is_one_line_and_others_keep_their_form(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ours = str(Path(carrywave.__file__).parent / "kernels/dispatch.py")
    others: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: others.append(str(message)))
    plain_warnings()
    for text, category, place in (
        ("the kernel\nis not used", UserWarning, ours),
        ("old", DeprecationWarning, ours),
        ("theirs", UserWarning, "/lib/torch/nn.py"),
    ):
        warnings.showwarning(text, category, place, 75)
    assert capsys.readouterr().err == "carrywave: warning: the kernel is not used\n"
    assert others == ["old", "theirs"]
