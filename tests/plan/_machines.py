"""Profiles of machines that do not exist, with round constants."""

from __future__ import annotations

from typing import Any

from carrywave.plan.profile import Link, Profile
from carrywave.plan.rates import CallKind, Precision, Rate
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

GIB = 1 << 30
CONSTANTS: dict[CallKind, dict[str, float]] = {
    "layer": {"call_seconds": 50e-6, "step_seconds": 10e-6, "product_seconds": 5e-12},
    "head": {"call_seconds": 20e-6, "product_seconds": 12e-12},
    "embedding": {"call_seconds": 30e-6, "element_seconds": 1e-10},
    "plain": {"call_seconds": 10e-6, "element_seconds": 1e-10},
}


def rates(*precisions: Precision) -> tuple[Rate, ...]:
    found = [Rate(kind, precision, **constants) for precision in precisions for kind, constants in CONSTANTS.items()]
    return (*found, *(Rate("update", width, 1e-5, element_seconds=1e-10) for width in ("fp32", "fp64")))  # type: ignore[arg-type]


def machine(*precisions: Precision, **changes: Any) -> Profile:
    """A fast one, eight devices to a host."""
    given: dict[str, Any] = {
        "name": "made up",
        "hardware": "none",
        "source": "published",
        "memory_bytes": 80 * GIB,
        "rates": rates(*(precisions or ("fp32",))),
        "within": Link(5e-6, 200e9),
        "between": Link(20e-6, 40e9),
        "devices_per_host": 8,
        "task_seconds": 20e-6,
        "step_seconds": 200e-6,
    }
    return Profile(**{**given, **changes})


def units_of(vocabulary: int = 4096, **parts: Any) -> Units:
    """A language model, 2 x 512 over 16 lanes x 32 steps unless said otherwise."""
    spec = {"model": {"hidden": 512, "layers": 2}, "batch": {"lanes": 16, "steps": 32}, **parts}
    return Units.of(Spec.model_validate(spec), DataFacts(vocabulary=vocabulary))
