"""The torch-free layers stay so: importing them must not load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys
module = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(getattr(module, "__path__", []), sys.argv[1] + "."):
    importlib.import_module(found.name)
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("name", "loads_torch"),
    [
        ("carrywave", None),
        ("carrywave.cells", False),
        ("carrywave.spec", False),
        ("carrywave.plan", False),
        ("carrywave.data.order", False),
        ("carrywave.cli", False),
        ("carrywave.kernels", True),  # shows that the question can be answered with yes
    ],
)
def test_torch_is_loaded_only_where_it_is_needed(name: str, loads_torch: bool | None) -> None:
    code = "import carrywave, sys; print('torch' in sys.modules)" if loads_torch is None else IMPORT_ALL
    answer = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == str(bool(loads_torch))
