"""carrywave trains stacked LSTMs and GRUs with an explicit carry. Names are imported lazily, so the spec can be used without torch."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in typing, whose import takes long enough to be met by Ctrl-C, before a command can end quietly
if TYPE_CHECKING:
    from typing import Any

    from carrywave.cells.cell import Cell
    from carrywave.data.batch import Batch
    from carrywave.exporting.run_export import export_run as export
    from carrywave.kernels.carry import Carry
    from carrywave.model.lstm import GRU, LSTM
    from carrywave.model.model import Model
    from carrywave.model.over_time.front import Front
    from carrywave.model.recurrent import Recurrent
    from carrywave.plan.plan import Plan
    from carrywave.prediction.evaluate import evaluate_run as evaluate
    from carrywave.prediction.predict import predict
    from carrywave.prediction.stepper import stepper
    from carrywave.spec.load import load as load_spec
    from carrywave.spec.spec import Spec
    from carrywave.step.trainer import Trainer
    from carrywave.train.callbacks import Callback, Moment
    from carrywave.train.forecaster import Forecaster
    from carrywave.train.from_python import fit
    from carrywave.tuning.tune import tune

__version__ = "0.1.0"

__all__ = [
    "GRU",
    "LSTM",
    "Batch",
    "Callback",
    "Carry",
    "Cell",
    "Forecaster",
    "Front",
    "GlobalNorm",
    "Model",
    "Moment",
    "Plan",
    "Recurrent",
    "Spec",
    "Trainer",
    "__version__",
    "evaluate",
    "export",
    "fit",
    "load_spec",
    "predict",
    "stepper",
    "tune",
]

_HOMES = {
    "Batch": ("carrywave.data.batch", "Batch"),
    "Callback": ("carrywave.train.callbacks", "Callback"),
    "Carry": ("carrywave.kernels.carry", "Carry"),
    "Cell": ("carrywave.cells.cell", "Cell"),
    "Forecaster": ("carrywave.train.forecaster", "Forecaster"),
    "Front": ("carrywave.model.over_time.front", "Front"),
    "GRU": ("carrywave.model.lstm", "GRU"),
    "GlobalNorm": ("carrywave.model.over_time.global_norm", "GlobalNorm"),
    "LSTM": ("carrywave.model.lstm", "LSTM"),
    "Model": ("carrywave.model.model", "Model"),
    "Moment": ("carrywave.train.callbacks", "Moment"),
    "Plan": ("carrywave.plan.plan", "Plan"),
    "Recurrent": ("carrywave.model.recurrent", "Recurrent"),
    "Spec": ("carrywave.spec.spec", "Spec"),
    "Trainer": ("carrywave.step.trainer", "Trainer"),
    "evaluate": ("carrywave.prediction.evaluate", "evaluate_run"),
    "export": ("carrywave.exporting.run_export", "export_run"),
    "fit": ("carrywave.train.from_python", "fit"),
    "load_spec": ("carrywave.spec.load", "load"),
    "predict": ("carrywave.prediction.predict", "predict"),
    "stepper": ("carrywave.prediction.stepper", "stepper"),
    "tune": ("carrywave.tuning.tune", "tune"),
}


def _cells() -> set[str]:
    return {name.upper() for name in importlib.import_module("carrywave.cells.cell").names()}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(importlib.import_module(module), attribute)
    if name.isupper() and name in _cells():
        return getattr(importlib.import_module("carrywave.model.lstm"), name)  # the layers of a cell
    raise AttributeError(f"module 'carrywave' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_cells()})
