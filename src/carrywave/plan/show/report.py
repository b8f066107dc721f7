"""The choice of a plan as plain data: a spec's `plan:` section, and JSON-ready objects for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from carrywave.plan.plan import Plan
from carrywave.plan.predict import Prediction
from carrywave.plan.search import PlanChoice, describe
from carrywave.plan.show.text import stage_names
from carrywave.plan.units import Units


def section(plan: Plan, units: Units) -> dict[str, Any]:
    """The `plan:` section of a spec that gives exactly this plan on its number of workers; defaults are omitted."""
    keys: dict[str, Any] = {"replicas": plan.replicas, "stages": plan.stages}
    chunk_steps = plan.chunk_steps
    if plan.stages > 1:
        keys["cuts"] = list(plan.edges(len(units))[1:-1])
        if chunk_steps is None and plan.micro_batches == 1 and not units.whole:
            chunk_steps = max(shape.steps for shape in units.shapes)  # if omitted, `resolve` would cut the window into chunks
    if chunk_steps is not None:
        keys["chunk_steps"] = chunk_steps
    if plan.micro_batches > 1:
        keys["micro_batches"] = plan.micro_batches
    keys |= {name: value for name in ("recompute", "share_head") if (value := getattr(plan, name))}
    return keys if plan.kernel == "auto" else keys | {"kernel": plan.kernel}


def yaml_line(plan: Plan, units: Units) -> str:
    """The section as one line of YAML."""
    parts = (f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in section(plan, units).items())
    return f"plan: {{{', '.join(parts)}}}"


def choice_object(units: Units, choice: PlanChoice) -> dict[str, Any]:
    """Everything that is printed about a choice."""
    best = choice.best
    return {
        **_figures(units, best),
        "why": choice.why,
        "devices": choice.devices,
        "asked": choice.chosen is not None,
        "stages": [
            {"units": name, "work_seconds": busy, "limit_bytes": best.limit_bytes, "memory_bytes": memory.total, "memory": asdict(memory)}
            for name, busy, memory in zip(stage_names(best, len(units)), best.timeline.busy, best.memory, strict=True)
        ],
        "bubble": best.timeline.bubble,
        "sent_bytes": best.sent_bytes,
        "reduced_bytes": best.reduced_bytes,
        "efficiency": choice.efficiency,
        "alternatives": [_figures(units, each) | {"why": choice.beside(each)} for each in choice.rivals],
    }


def _figures(units: Units, found: Prediction) -> dict[str, Any]:
    speed = {"step_seconds": found.seconds, "tokens_per_second": found.tokens_per_second}
    return {"choice": describe(found.plan), "plan": section(found.plan, units), **speed}
