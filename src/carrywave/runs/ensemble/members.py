"""Opens several runs that predict together, and refuses those that do not predict the same thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from carrywave.data.codec import Codec
from carrywave.errors import RunError, UserError
from carrywave.parallel.world import World
from carrywave.runs.trained_run import Saved, open_run

Paths = Path | str | Sequence[Path | str]
# How numbers are scaled, and what is only known of the training data, may differ: predictions are averaged in the units of the data.
MAY_DIFFER = (
    *("mean", "std", "target_mean", "target_std", "names", "means", "stds", "spreads"),
    *("own_scale", "scale_season", "frequency", "date_order", "utc", "zone", "label_kind"),
)


def paths_of(runs: Paths) -> list[Path | str]:
    """The runs that are named, at least one."""
    if isinstance(runs, Path | str):
        return [runs]
    paths = list(runs)
    if not paths or not all(isinstance(each, Path | str) for each in paths):
        raise UserError("pass the folder of a run, or a list of several folders")
    return paths


def open_members(paths: Sequence[Path | str], device: str, world: World) -> list[Saved]:
    """The best weights of several runs. Every worker holds all of them as a whole."""
    members = [open_run(path, device, world=world, whole=True) for path in paths]
    for member in members:
        if member.spec.model.crf:
            raise UserError(
                f"{member.run.path} chooses whole sequences of labels (model.crf), and has no probabilities of single ones to average; "
                "pass one run"
            )
        _check_alike(members[0], member)
    if members[0].spec.task == "transcription":
        raise RunError(
            "runs of transcription cannot be averaged: each puts a label at another step, so that the mean of their probabilities has "
            "none; pass one run"
        )
    return members


def _check_alike(first: Saved, other: Saved) -> None:
    differs = [field.name for field in fields(Codec) if field.name not in MAY_DIFFER and _of(first, field.name) != _of(other, field.name)]
    if first.spec.task == "forecasting":
        differs += [name for name in ("horizon", "levels", "bands") if getattr(first.spec.data, name) != getattr(other.spec.data, name)]
    if differs:
        what = differs[0] if differs[0].endswith("s") else f"{differs[0]}s".replace("ys", "ies")
        raise RunError(
            f"{first.run.path} and {other.run.path} do not predict the same thing: their {what} differ; "
            "pass runs that were trained for the same task on the same kind of data"
        )


def _of(saved: Saved, name: str) -> object:
    return getattr(saved.task.codec, name)
