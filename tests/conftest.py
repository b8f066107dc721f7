"""What all tests share: no writing outside temporary folders, hypothesis without deadlines, and gpu tests skipped where there is none."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: many small tests side by side

import hypothesis
import pytest

# Never judged by the clock: the machine may be busy. Derandomized: a failure seen once can be seen again.
hypothesis.settings.register_profile("carrywave", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("carrywave")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Parsed data goes to a temporary folder, not to the user's cache; child processes inherit it."""
    os.environ["CARRYWAVE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
