"""The spec that a call from Python asks for: a whole one, or its sections one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carrywave.plan.plan import Plan
from carrywave.spec.load import load, parse
from carrywave.spec.spec import Spec


def spec_of(spec: Spec | Mapping[str, Any] | str | Path | None, model: Any, plan: Any, sections: Mapping[str, Any]) -> Spec:
    """Combine them; sections given beside a whole spec take precedence."""
    base: dict[str, Any]
    # Only fields that were set: the others may still be derived from elsewhere.
    if isinstance(spec, Spec):
        base = spec.model_dump(mode="json", exclude_unset=True)
    elif isinstance(spec, str | Path):
        base = load(Path(spec), []).model_dump(mode="json", exclude_unset=True)
    else:
        base = dict(spec or {})
    for name, value in sections.items():
        old = base.get(name)
        base[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    if isinstance(model, Mapping):
        base["model"] = dict(model)
    if isinstance(plan, Plan):
        plan = {name: value for name, value in asdict(plan).items() if value != getattr(Plan(), name)}
    if plan != "auto":
        base["plan"] = plan if isinstance(plan, str) else dict(plan)
    return parse(base)
