"""What commands are given alike: a spec with overrides, a device, the name of a file to write."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from carrywave.errors import UserError
from carrywave.runs.watcher import printable


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class _Flags:
    """In help, a switch takes no value: nothing is to be written behind it."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_Flags, TyperCommand):
    """A command."""


class Group(_Flags, TyperGroup):
    """All commands together. A word that they do not know is a mistake as any other: one line, exit 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that the words name, and end the process with its exit code."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            sys.exit(1)
        except Exception as error:
            if not hasattr(error, "format_message"):  # of the parser, whose classes have no public name
                raise
            context = getattr(error, "ctx", None)
            message = " ".join(error.format_message().split())
            if context is None or not message or "Usage:" in message:  # no words at all: help is what is shown
                error.show()  # type: ignore[attr-defined]
            else:
                note(f"{message.rstrip('.')}; {context.command_path} --help lists what there is")
            sys.exit(2)
        sys.exit(code or 0)


def note(message: str) -> None:
    """One line on stderr."""
    print(f"carrywave: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)


DeviceOption = Annotated[Device, typer.Option(help="Where to compute; auto takes CUDA where there is one.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write rows that a program can read.")]


def spec_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    """The spec file among the words of a command, and what is to be changed in it."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UserError(f"{files[1]} is a second spec file beside {files[0]}; give one SPEC.yaml, and the rest as key=value")
    return (Path(files[0]) if files else None), [word for word in words if "=" in word]


def plain(value: object) -> object:
    """A value for JSON, which knows neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
