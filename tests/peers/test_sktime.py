"""sktime's checks of estimators, on the adapter that the documentation shows."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest

pytest.importorskip("sktime")
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
OF_THE_TEXT = (
    "test_class_has_doctest_example",
    "test_get_test_params_coverage",
)  # they ask for documentation and a second set of parameters


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sktime.utils.estimator_checks import check_estimator

    monkeypatch.chdir(tmp_path)
    [snippet] = re.findall(r"```python\n(from sktime.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "adapter.py").write_text("import pandas as pd\nimport carrywave as cw\n" + snippet)  # a module, since it is pickled
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = check_estimator(importlib.import_module("adapter").Carrywave, verbose=False, tests_to_exclude=list(OF_THE_TEXT))
    assert {name: said for name, said in told.items() if said != "PASSED"} == {}
    assert len(told) > 100
