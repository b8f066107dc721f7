"""Every command and every spec that a page shows is one that works here: each is taken by the program it names, or listed with a reason.

`carrywave` commands are read by carrywave's own parser, those under torchrun by torchrun's too; what trains or plans is then run, with
`--dry-run`. The quick start (index.md) is run as it stands in test_quickstart.py, the programs of examples/ in tests/test_examples.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from carrywave.cli.main import app
from carrywave.cli.options import spec_and_overrides
from carrywave.spec.load import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
GROUP = typer.main.get_command(app)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
HERE = "(?:carrywave|torchrun|python|pytest|pip|scripts/)"  # what a command in the middle of a sentence begins with
PROGRAM = rf"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?{HERE}[\w./]*(?= |$)"

# Programs that cannot be started in a test, and why. What they start (srun …) is taken like any other command.
ELSEWHERE = {
    "srun": "needs Slurm: tests/engines/test_slurm.py",
    "sbatch": "needs Slurm; the job file is read in tests/launch/test_job_files.py",
    "kubectl": "needs Kubernetes; the job file is read in tests/launch/test_job_files.py",
    "sky": "needs SkyPilot; the job file is read in tests/launch/test_job_files.py",
    "ray": "needs a Ray cluster: tests/engines/test_ray.py",
    "cc": "compiles what a reader has exported (tests/exporting/test_c_file.py), or needs TestU01",
    ".": "the shell's own",
    "export": "the shell's own",
}
# Commands of carrywave that are not run, and why.
NOT_RUN = {
    "--resume": "needs the run",
    "--init": "needs the run",
    "--on ray": "needs Ray: tests/engines/test_ray.py",
    "CARRYWAVE_SHARE_GPU": "needs a GPU: tests/gpu",
    "examples/": "recipes, which read data that is fetched first: tests/test_recipes.py",
    "--cluster": "planned in tests/cli/test_plan.py",
    "--devices N": "a number of the reader's own",
    "machine.json": "needs a measured profile",
    "runs/words": "needs the run",
    "runs/search": "needs the search",
    "--seeds": "starts several runs: tests/tuning/test_seeds.py",
    "signals.yaml": "a spec of the reader's own",
    "vowels.yaml": "a spec of the reader's own",
    "model.hiden": "shows the refusal",
    "track=": "needs a tracker: tests/runs/test_tracking.py",
    "SPEC.yaml": "a spec of the reader's own",
    "FILE": "a file of the reader's own",
    "--profile": "in the middle of a sentence; the commands with all their options are run",
}


def commands(page: Path) -> list[str]:
    """The commands that a page shows: in shell blocks, indented, or quoted in a sentence; without comments, one by one."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in _program_texts_left_out(block).replace("\\\n", " ").splitlines()]
    lines += re.findall(rf"^    (?:\$ )?({PROGRAM}.*)$", rest, re.MULTILINE)
    lines += [quoted.replace("\n", " ") for quoted in re.findall(rf"`({PROGRAM} [^`]*)`", rest)]
    found = [re.split(r"\s#\s| {3,}", line)[0].strip() for line in lines]
    return [part.strip() for line in found for part in _parts(line) if part.strip()]


def _program_texts_left_out(block: str) -> str:
    return re.sub(r"<<'END'\n.*?^END$", "", block, flags=re.MULTILINE | re.DOTALL)


def _parts(line: str) -> list[str]:
    """The commands of a line: those that follow each other, each without the files of the shell."""
    words = shlex.split(line, posix=False) if line.count("'") % 2 == 0 and line.count('"') % 2 == 0 else line.split()
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", ";", "|"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [re.split(r" [<>] ?", " ".join(part))[0] for part in parts]


def take(command: str) -> None:
    """Give a command to the program that it names; an unknown one is an error."""
    words = [word for word in shlex.split(command) if word != "…"]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words:
        return
    name = words[0].removeprefix(".venv/bin/")
    if name.startswith("scripts/"):
        assert os.access(ROOT / name, os.X_OK), command
        return
    if name == "srun":
        take(shlex.join(words[words.index("carrywave") :]) if "carrywave" in words else "")
    if name not in ELSEWHERE:
        taker = TAKERS.get(re.sub(r"[0-9.]+$", "", name))
        assert taker is not None, f"{command}: no test runs {name}; give it to one here, or list it in ELSEWHERE with a reason"
        taker(command, words[1:])


def _carrywave(command: str, words: list[str]) -> None:
    if not words or words[0] == "COMMAND":
        return
    name, *rest = words
    if name.startswith("-"):
        assert any(name in option.opts for option in GROUP.params) or name == "--help", command
        return
    assert name in GROUP.commands, command  # type: ignore[attr-defined]
    rest = ["2" if word == "N" else word for word in rest]
    taker = GROUP.commands[name]  # type: ignore[attr-defined]
    if rest and any(rest[-1] in option.opts and not getattr(option, "is_flag", False) for option in taker.params):
        rest.append("FILE")  # an option named in a sentence, without its value
    # A command in a sentence may leave out what it needs, such as the run.
    context = taker.make_context(name, rest) if _is_whole(name, rest) else None
    if context is not None and name in ("train", "plan") and "model.hiden" not in command:
        load(None, spec_and_overrides(context.params["spec"] or [])[1])


def _is_whole(name: str, words: list[str]) -> bool:
    needs = {"evaluate": 1, "predict": 1, "report": 1, "export": 3, "backtest": 1, "launch": 3}
    return len(words) >= needs.get(name, 0)


def _torchrun(command: str, words: list[str]) -> None:
    if all(word.startswith("-") or word.isdecimal() for word in words):
        return  # its options alone
    found = get_args_parser().parse_args(words)
    if not found.module:
        assert (ROOT / found.training_script).is_file() or found.training_script == "train.py", command
        return
    assert found.training_script == "carrywave", command
    _carrywave(command, found.training_script_args)
    # A reader adds options of carrywave, which torchrun must not take for its own.
    get_args_parser().parse_args([*words, "--run", "runs/words", "--devices", "2", "--restarts", "1", "--resume"])


def _python(command: str, words: list[str]) -> None:
    if words[:2] == ["-m", "venv"] or words[0] in ("-c", "-"):
        return
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, command
        return
    assert (ROOT / words[0]).is_file() or words[0] in ("examples/NAME.py", "train.py"), command


def _pytest(command: str, words: list[str]) -> None:
    markers = [marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]]
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m":
            assert word.removeprefix("not ") in markers, command
        elif before != "-k" and not word.startswith("-"):
            assert (ROOT / word).exists(), command


def _pip(command: str, words: list[str]) -> None:
    assert words[0] in ("install", "uninstall"), command
    for listed in re.findall(r"(?:carrywave|\.)\[([\w,]+)\]", command):
        assert set(listed.split(",")) <= set(PROJECT["project"]["optional-dependencies"]), command


TAKERS: dict[str, Callable[[str, list[str]], None]] = {
    "carrywave": _carrywave,
    "torchrun": _torchrun,
    "python": _python,
    "pytest": _pytest,
    "pip": _pip,
}


def each(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=[str(page.relative_to(ROOT)) for page in pages])


@each(PAGES)
def test_every_command_is_taken_by_its_program(page: Path) -> None:
    for command in commands(page):
        try:
            take(command)
        except (SystemExit, Exception) as error:
            pytest.fail(f"{command}: {error}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands of the pages name: the spec of the README, and texts that it can read."""
    made = tmp_path_factory.mktemp("commands")
    spec = next(block for block in re.findall(r"^```yaml\n(.*?)^```", PAGES[0].read_text("utf-8"), re.MULTILINE | re.DOTALL))
    (made / "words.yaml").write_text(spec)
    for name in ("train.txt", "valid.txt", "test.txt"):
        (made / name).write_text("the carry is passed along, and work moves through layers and time as a wave. " * 40)
    hours = (f"2026-01-{1 + hour // 24:02d} {hour % 24:02d}:00,{hour % 24}\n" for hour in range(600))
    (made / "loads.csv").write_text(f"date,load\n{''.join(hours)}")
    (made / "demand.csv").write_text(
        "unique_id,ds,y\n" + "".join(f"item {day % 2},2025-01-{1 + day // 2:02d},{day % 3}\n" for day in range(62))
    )
    days = (f"{name},2026-{1 + day // 28:02d}-{1 + day % 28:02d},{day % 5},{day % 9},7,{day % 4}\n" for name in "ab" for day in range(200))
    (made / "rivers.csv").write_text(f"basin,date,rain,warmth,area,flow\n{''.join(days)}")
    (made / "slots").mkdir()
    for name in ("train.jsonl", "valid.jsonl", "test.jsonl"):
        (made / "slots" / name).write_text('{"tokens": ["by", "the", "Beatles"], "labels": ["O", "B-artist", "I-artist"]}\n' * 5)
    (made / "train.jsonl").write_text('{"text": "a b c", "label": "x", "weight": 2}\n{"text": "c b", "label": "y"}\n' * 20)
    for part in ("train", "dev"):
        (made / f"en_ewt-ud-{part}.conllu").write_text(
            "1\tHi\thi\tINTJ\t_\t_\t0\troot\t_\t_\n2\tAnn\tAnn\tPROPN\t_\t_\t1\tobj\t_\t_\n\n" * 5
        )
    for part in ("train", "test"):
        (made / "atis" / part).mkdir(parents=True)
        (made / "atis" / part / "seq.in").write_text("fly to Rome\n" * 5)
        (made / "atis" / part / "seq.out").write_text("O O B-city\n" * 5)
        (made / f"GunPoint_{part.upper()}.tsv").write_text("1\t0.5\t1.5\t2.5\n2\t-0.5\t1.0\t-2.0\n" * 5)
    (made / "SMSSpamCollection.tsv").write_text("ham\tOk lar\nspam\tFree entry now\n" * 5)
    return made


def runnable() -> list[str]:
    """What trains or plans, with all that it needs, once each."""
    found = [command for page in PAGES if page.name != "index.md" for command in commands(page) if "…" not in command]
    found = [command.removeprefix(".venv/bin/") for command in found]
    wanted = [command for command in found if command.startswith(("carrywave train", "carrywave plan")) and command.count(" ") > 1]
    return sorted({command for command in wanted if not any(part in command for part in NOT_RUN)})


@pytest.mark.parametrize("command", runnable())
def test_what_trains_or_plans_runs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(command)[1:]
    more = ["--device", "cpu", *([] if "--dry-run" in words else ["--dry-run"])] if words[0] == "train" else []
    ended = CliRunner().invoke(app, [*words, *more])
    assert ended.exit_code == 0, ended.output


@each(PAGES)
def test_specs_load(page: Path, tmp_path: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        if re.search(r"^task:", block, re.MULTILINE):
            (tmp_path / "spec.yaml").write_text(block)
            load(tmp_path / "spec.yaml", [])


def test_a_new_program_must_be_given_to_a_test(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nnovel --option words.yaml   # never seen\n```\n\nor `torchrun -m carrywave train … --run DIR`\n")
    novel, misled = commands(page)
    with pytest.raises(AssertionError, match="no test runs novel"):
        take(novel)
    with pytest.raises(SystemExit):
        take(misled)


def test_there_is_something_to_check() -> None:
    every = [command for page in PAGES for command in commands(page)]
    assert len(every) > 200
    assert len(runnable()) > 15
    used = [*ELSEWHERE, *NOT_RUN]
    assert [part for part in used if not any(part in command for command in every)] == []  # what is listed is there
