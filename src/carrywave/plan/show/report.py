"""The choice of a plan as plain data: a spec's `plan:` section, and JSON-ready objects for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from carrywave.plan.plan import Plan
from carrywave.plan.predict import Prediction
from carrywave.plan.scaling import Scale
from carrywave.plan.search import PlanChoice, describe
from carrywave.plan.show.text import scale_sentence, stage_names
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
    return {
        "choice": describe(choice.best.plan),
        "why": choice.why,
        "devices": choice.devices,
        "plan": section(choice.best.plan, units),
        "stages": stages(units, choice.best),
        **_figures(choice.best),
        "bubble": choice.best.bubble,
        "sent_bytes": choice.best.sent_bytes,
        "reduced_bytes": choice.best.reduced_bytes,
        "efficiency": choice.efficiency,
        "transport": {"messages": choice.best.transports.messages, "sums": choice.best.transports.sums},
        "recorded": choice.best.transports.recorded,
        "alternatives": [
            {
                "choice": describe(rival.plan),
                "plan": section(rival.plan, units),
                "why": rival.why,
                **({} if rival.prediction is None else _figures(rival.prediction)),
            }
            for rival in choice.rivals
        ],
    }


def stages(units: Units, prediction: Prediction) -> list[dict[str, Any]]:
    """The stages of a plan: units, seconds of work and memory of each."""
    return [
        {
            "units": name,
            "first_unit": stage.first,
            "after_last_unit": stage.last,
            "work_seconds": stage.seconds,
            "memory_bytes": stage.memory.total,
            "limit_bytes": stage.limit_bytes,
            "memory": asdict(stage.memory),
        }
        for stage, name in zip(prediction.stages, stage_names(prediction, len(units)), strict=True)
    ]


def scale_object(units: Units, scale: Scale) -> dict[str, Any]:
    """Everything that is printed about scaling."""
    return {
        "pays_up_to": scale.pays_up_to,
        "why": scale_sentence(scale),
        "scale": [
            {
                "devices": point.devices,
                "used": point.prediction.plan.workers,
                **_figures(point.prediction),
                "efficiency": point.efficiency,
                "device_seconds_per_million_tokens": point.prediction.plan.workers * 1e6 / point.prediction.tokens_per_second,
                "choice": describe(point.prediction.plan),
                "plan": section(point.prediction.plan, units),
            }
            for point in scale.points
        ],
    }


def _figures(prediction: Prediction) -> dict[str, Any]:
    return {"step_seconds": prediction.seconds, "tokens_per_second": prediction.tokens_per_second}
