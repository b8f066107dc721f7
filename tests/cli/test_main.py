"""The command line: what reaches the functions below it, and how it ends."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import carrywave
from carrywave.cli.main import app
from carrywave.errors import DataError, PortError, ResourceError
from carrywave.launch import launch_record
from carrywave.spec.describe import schema as spec_schema
from carrywave.spec.load import dump, load, parse
from carrywave.spec.spec import Spec

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts functions in the place of a module of carrywave.train, so that the commands can be tried without training."""

    def put(module: str, **functions: Callable[..., Any]) -> None:
        stand_in = ModuleType(module)
        vars(stand_in).update(functions)
        monkeypatch.setitem(sys.modules, module, stand_in)

    return put


def call(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def process(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "carrywave", *words], capture_output=True, text=True, cwd=folder, timeout=60)


def test_a_folder_that_was_removed_is_no_place_to_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, said = call("schema")
    assert (code, said) == (2, "carrywave: the current folder no longer exists; change to another one (cd)\n")


# As processes: these three pay for the start of Python.


def test_a_mistake_in_a_spec_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("model: {hiden: 3}\n")
    ended = process("train", "spec.yaml", folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "carrywave: unknown key model.hiden; did you mean model.hidden?\n"
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


def test_a_wrong_option_is_exit_2_without_a_traceback(tmp_path: Path) -> None:
    ended = process("train", "--nonsense", folder=tmp_path)
    assert ended.returncode == 2
    assert "No such option" in ended.stderr
    assert "Traceback" not in ended.stderr


# Within this process.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "missing.yaml"], "missing.yaml does not exist; pass the path of a spec file, or key=value"),
        (["train", "model.hidden=0"], "model.hidden is 0; use a whole number >= 1, or a list, each item a whole number >= 1"),
        (["train", "train.lr=.nan"], "train.lr is nan, which is not finite; use a number > 0"),
        (["train", "a.yaml", "b.yaml"], "b.yaml is a second spec file, after a.yaml; pass one SPEC.yaml, and the rest as key=value"),
        (["train", "--resume"], "--resume needs a run folder; pass --run DIR"),
        (
            ["train", "--resume", "--run", "none"],
            "none has no run to resume (no spec.yaml); correct --run, or remove --resume to start a new run",
        ),
        (["train", "--json", "no/rows.json"], "no/rows.json cannot be written: folder no not found; create it, or use another path"),
        (["evaluate", "run", "--json", "."], ". is a folder; pass a file name"),
        (["predict", "run", "--temperature", "nan"], "--temperature is nan; use a number >= 0"),
        (["predict", "run", "--temperature", "-1"], "--temperature is -1.0; use a number >= 0"),
        (["schema", "-o", "no/schema.json"], "no/schema.json cannot be written: folder no not found; create it, or use another path"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: list[str], message: str) -> None:
    assert call(*words) == (2, "", f"carrywave: {message}\n")


@pytest.mark.parametrize(
    "words",
    [["train", "--device", "tpu"], ["predict", "run", "--tokens", "0"], ["nonsense"]],
)
def test_wrong_usage_is_exit_2(words: list[str]) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"carrywave: [^\n]*; see carrywave .*--help\n", err)


def test_help_and_version() -> None:
    assert call("--version") == (0, f"carrywave {carrywave.__version__}\n", "")
    code, out, _ = call("train", "--help")
    assert code == 0
    assert "--dry-run" in out


@pytest.mark.parametrize("command", ["train", "plan", "evaluate", "predict"])
def test_help_of_a_switch_asks_for_no_value(command: str) -> None:
    out = call(command, "--help")[1]
    assert "--help" in out
    assert "bool" not in out
    if command in ("evaluate", "predict"):
        assert "Default: 1." in " ".join(out.replace("│", " ").split())
        assert "GPU that pays" not in " ".join(out.replace("│", " ").split())


def test_no_file_and_an_empty_one_are_the_same_spec(install: Install, tmp_path: Path) -> None:
    seen: list[Spec] = []

    def train(spec: Spec, **rest: object) -> object:
        seen.append(spec)
        return SimpleNamespace(ending="done")

    install("carrywave.train.fit", train=train)
    (tmp_path / "empty.yaml").write_text("")
    assert call("train", "model.layers=3")[0] == 0
    assert call("train", str(tmp_path / "empty.yaml"), "model.layers=3")[0] == 0
    assert seen[0] == seen[1] == load(None, ["model.layers=3"])


IS_DATA = "{0} is a data file, not a spec; to train on it, pass data.train={0} instead"
NO_SPEC = {
    "ansi.yaml": ('"mod\\e[31mel": 3', "unknown key mod\\x1b[31mel; did you mean model?"),
}


@pytest.mark.parametrize("name", NO_SPEC)
def test_what_is_no_spec(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, message = NO_SPEC[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert call("train", name) == (2, "", f"carrywave: {message}\n")


def test_what_a_dry_run_prints_is_a_spec(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 20)
    words = [f"data.train={tmp_path / 'text.txt'}", "model.hidden=4", "batch.lanes=2", "train.class_weights=null", "plan.chunk_steps=16"]
    code, first, err = call("train", *words, "--dry-run", "--device", "cpu")
    assert (code, err) == (0, "")
    (tmp_path / "printed.yaml").write_text(first)
    assert load(tmp_path / "printed.yaml") == load(None, [*words, "train.precision=fp32"])  # what auto is on a CPU
    code, second, _ = call("train", str(tmp_path / "printed.yaml"), "--dry-run", "--device", "cpu")
    assert code == 0
    assert [line for line in second.splitlines() if "into the cache" not in line] == [
        line for line in first.splitlines() if "into the cache" not in line
    ]
    assert "# model     LSTM 2 x 4" in first


def test_train_hands_everything_on(install: Install, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def train(spec: Spec, *, watch: Any, **rest: object) -> object:
        seen.update(rest, spec=spec)
        watch.begin("summary")
        watch.evaluated({"split": "valid", "epoch": 1, "step": 5, "loss": 0.5, "mase": float("nan")})
        watch.end("done")
        (tmp_path / "metrics.jsonl").write_text('{"split": "valid", "epoch": 1, "step": 5, "loss": 0.5, "mase": null}\n')
        return SimpleNamespace(ending="done", run=tmp_path, table={})

    install("carrywave.train.fit", train=train)
    spec, rows = tmp_path / "spec.yaml", tmp_path / "rows.json"
    spec.write_text("model: {hidden: 8}\n")
    words = [
        "train",
        str(spec),
        "train.lr=3e-4",
        "--run",
        "r",
        "--init",
        "w",
        "--device",
        "cpu",
        "--json",
        str(rows),
        "plan.micro_batches=2",
    ]
    assert call(*words) == (0, "summary\nvalid epoch 1 step 5: loss 0.5000  mase nan\ndone\n", "")
    assert seen.pop("spec") == load(spec, ["train.lr=3e-4", "plan.micro_batches=2"])
    assert seen == {"run": Path("r"), "resume": False, "init": "w", "device": "cpu", "dry_run": False}
    assert json.loads(rows.read_text()) == [{"split": "valid", "epoch": 1, "step": 5, "loss": 0.5, "mase": None}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "rows.json", "spec.yaml"]


def test_a_resumed_run_writes_its_earlier_evaluations_too(install: Install, tmp_path: Path) -> None:
    run, rows = tmp_path / "run", [{"split": split, "epoch": 1, "step": 5, "loss": 0.5} for split in ("train", "valid", "test")]
    run.mkdir()
    (run / "spec.yaml").write_text(dump(Spec()))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    install("carrywave.train.fit", train=lambda spec, **rest: SimpleNamespace(ending="done", run=run, table={}))
    words = ("train", "--run", str(run), "--resume", "--device", "cpu", "--json", str(tmp_path / "rows.json"))
    assert call(*words)[0] == 0
    assert json.loads((tmp_path / "rows.json").read_text()) == rows[1:]


def test_continue_resumes_what_is_there(install: Install, tmp_path: Path) -> None:
    seen: list[bool] = []

    def train(spec: Spec, **options: Any) -> SimpleNamespace:
        seen.append(options["resume"])
        return SimpleNamespace(ending="done")

    install("carrywave.train.fit", train=train)
    words = ["train", "model.hidden=7", "--continue", "--run", str(tmp_path / "run"), "--init", "w", "--device", "cpu"]
    assert call(*words)[0] == 0
    (tmp_path / "run").mkdir()
    assert call(*words)[0] == 0
    (tmp_path / "run" / "spec.yaml").write_text(dump(Spec()))
    assert call(*words)[0] == 0
    assert seen == [False, False, True]


def test_resume_takes_the_spec_of_the_run(install: Install, tmp_path: Path) -> None:
    seen: list[Spec] = []

    def train(spec: Spec, **rest: object) -> object:
        seen.append(spec)
        return SimpleNamespace(ending="done")

    install("carrywave.train.fit", train=train)
    (tmp_path / "spec.yaml").write_text("model: {hidden: 8}\nplan: auto\n")
    assert call("train", "--resume", "--run", str(tmp_path), "train.epochs=3")[0] == 0
    assert seen == [parse({"model": {"hidden": 8}, "train": {"epochs": 3}}, defaults=False)]


@pytest.mark.parametrize(("ending", "code"), [("done", 0), ("early", 0), ("interrupted", 130), ("terminated", 75)])
def test_the_end_of_a_run_is_the_exit_code(install: Install, ending: str, code: int) -> None:
    install("carrywave.train.fit", train=lambda spec, **rest: SimpleNamespace(ending=ending))
    assert call("train")[0] == code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("a.txt is empty;\ngive text"), 2, "carrywave: a.txt is empty; give text"),
        (KeyboardInterrupt(), 130, "carrywave: interrupted"),
        (KeyboardInterrupt("go on with --resume"), 130, "carrywave: go on with --resume"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/x"),
            74,
            "carrywave: No space left on device: runs/a/x; free disk space, then try again",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            74,
            "carrywave: Too many open files; raise the limit of open files (ulimit -n 1024), then try again",
        ),
        (
            ImportError("x.so: failed to map segment from shared object"),
            74,
            "carrywave: not enough memory to load the program; raise the limit (ulimit -v) or free some memory",
        ),
        (ResourceError("port 1 is taken; use another"), 74, "carrywave: port 1 is taken; use another"),
        (PortError("port 1 is taken; use another"), 74, "carrywave: port 1 is taken; use another"),
        (MemoryError(), 74, "carrywave: not enough memory (MemoryError); reduce model.hidden, batch.lanes, batch.steps or batch.tokens"),
        (
            OSError(errno.EIO, "Input/output error", "runs/a/x"),
            74,
            "carrywave: Input/output error: runs/a/x; check the disk, then try again",
        ),
        (
            RuntimeError("can't start new thread"),
            74,
            "carrywave: no further thread can be started; raise the limit of processes (ulimit -u) or end other programs",
        ),
        (ZeroDivisionError("our fault"), 1, "carrywave: ZeroDivisionError: our fault"),
        (
            PermissionError(errno.EACCES, "Permission denied", "x"),
            2,
            "carrywave: x cannot be reached: Permission denied; give this user the permission, or name another",
        ),
    ],
)
def test_what_is_raised_becomes_a_line_and_a_code(install: Install, error: BaseException, code: int, line: str) -> None:
    def train(spec: Spec, **rest: object) -> None:
        raise error

    install("carrywave.train.fit", train=train)
    ended, out, err = call("train")
    assert (ended, out) == (code, "")
    assert err.splitlines()[0] == line
    assert ("Traceback" in err) == (code == 1)
    assert len(err.splitlines()) == 1 or code == 1


def test_a_stop_before_the_first_step_ends_in_order(install: Install, tmp_path: Path) -> None:
    left: list[str] = []

    def train(spec: Spec, **rest: object) -> object:
        launch_record.next_call()
        launch_record.set_run(tmp_path)
        try:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError
        finally:
            left.append("in order")

    install("carrywave.train.fit", train=train)
    before = signal.getsignal(signal.SIGTERM)
    assert call("train") == (143, "", "carrywave: stopped by SIGTERM before the first step; nothing was trained\n")
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "last").write_text("step-00000040\n")
    assert call("train") == (75, "", "carrywave: stopped by SIGTERM before the first step; the run is unchanged, at step 40\n")
    launch_record.next_call()
    assert left == ["in order"] * 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_evaluate(install: Install, tmp_path: Path) -> None:
    seen: list[object] = []

    def evaluate_run(
        run: Path, data: Path | None, device: str, top: Sequence[int], confusion: bool, note: Callable[[str], None], by: Sequence[str]
    ) -> dict[str, object]:
        note("odd")
        seen.extend((run, data, device, top))
        matrix = {"confusion": {"labels": ["a[b]", "c", "never"], "counts": [[3, 1, 0], [0, 2, 0], [0, 0, 0]]}}
        found = {"split": "test", "loss": 0.25, "accuracy": 0.975} | (matrix if confusion else {})
        return found | {f"by_{name}": [{name: "[red]", "f1": 0.5}] for name in by}

    install("carrywave.prediction.evaluate", evaluate_run=evaluate_run)
    rows = tmp_path / "rows.json"
    assert call("evaluate", "r", "--data", "d.jsonl", "--json", str(rows)) == (
        0,
        "test: loss 0.2500  accuracy 0.9750\n",
        "carrywave: odd\n",
    )
    assert seen == [[Path("r")], Path("d.jsonl"), "auto", ()]
    assert json.loads(rows.read_text()) == [{"split": "test", "loss": 0.25, "accuracy": 0.975}]
    code, out, _ = call("evaluate", "r", "--top", "3", "--top", "5", "--confusion", "--json", str(rows))
    assert (code, seen[-1]) == (0, [3, 5])
    shown = [line.replace("│", " ").replace("┃", " ").split() for line in out.splitlines()]
    assert ["a[b]", "3", "1"] in shown
    assert ["c", "0", "2"] in shown
    assert ["target", "\\", "predicted", "a[b]", "c"] in shown
    assert not any("never" in line for line in shown)
    assert json.loads(rows.read_text())[0]["confusion"]["counts"][0] == [3, 1, 0]
    code, out, _ = call("evaluate", "r", "--by", "label", "--json", str(rows))
    assert (code, "[red]" in out) == (0, True)  # a name in the data is not markup
    assert json.loads(rows.read_text())[1:] == [{"split": "test", "by": "label", "label": "[red]", "f1": 0.5}]


def test_predict(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    seen: dict[str, object] = {}
    install("carrywave.prediction.predict", predict_run=lambda run, input, output, **rest: seen.update(rest, files=(run, input, output)))
    assert (
        call("predict", "r", "in.jsonl", "-o", "out.jsonl", "--prompt", "The", "--tokens", "5", "--temperature", "0", "--seed", "3")[0] == 0
    )
    files = ([Path("r")], Path("in.jsonl"), Path("out.jsonl"))
    asked = {"prompt": "The", "tokens": 5, "temperature": 0.0, "seed": 3, "device": "auto", "beam": None, "samples": None, "steps": None}
    assert seen == {"files": files, **asked, "top_k": None, "top_p": None, "keep": (), "format": "auto"}
    assert call("predict", "r", "-", "-o", "-", "--keep", "id", "--keep", "label=truth", "--top-k", "5", "--top-p", "0.9")[0] == 0
    assert seen["files"] == ([Path("r")], "-", None)
    assert (seen["keep"], seen["top_k"], seen["top_p"]) == (("id", "label=truth"), 5, 0.9)


def test_schema(tmp_path: Path) -> None:
    code, out, _ = call("schema")
    file = tmp_path / "schema.json"
    assert code == 0
    assert call("schema", "-o", str(file)) == (0, "", "")
    assert json.loads(file.read_text()) == json.loads(out)
    assert "ModelSpec" in json.loads(out)["$defs"]


@pytest.mark.parametrize("module", ["ctypes", "contextlib", "the commands"])
def test_ctrl_c_before_libraries_load_is_quiet(module: str) -> None:
    """Python itself imports next to nothing before `main`, where a traceback could not be kept back."""
    program = f"""
        import sys
        assert not {{"typing", "contextlib", "ctypes"}} & set(sys.modules)
        import carrywave.__main__
        assert not {{"typing", "contextlib", "ctypes"}} & set(sys.modules)

        class Interrupts:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    raise KeyboardInterrupt

        if {module!r} == "the commands":
            import site; site.main()
            import typer.main
            typer.main.get_command = lambda app: Interrupts().find_spec({module!r})
        sys.meta_path.insert(0, Interrupts())
        carrywave.__main__.main()
    """
    where = {"PYTHONPATH": str(Path(carrywave.__file__).parents[1])}  # without site, which imports what it likes
    ended = subprocess.run([sys.executable, "-S", "-c", textwrap.dedent(program)], capture_output=True, text=True, env=where)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_too_little_memory_before_a_command_begins_is_one_line_and_74() -> None:
    program = """
        import carrywave.__main__, sys

        class Full:
            def find_spec(self, name, path=None, target=None):
                if name == "typer":
                    raise MemoryError("out of memory interning a name")

        sys.meta_path.insert(0, Full())
        carrywave.__main__.main()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    line = "carrywave: not enough memory to load the program; raise the limit (ulimit -v) or free some memory\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (74, "", line)


def test_ctrl_c_while_libraries_load_is_one_line_and_130(tmp_path: Path) -> None:
    program = (
        "import os, signal, time\n"
        "from carrywave.cli.exits import leaving_at_once\n"
        "with leaving_at_once():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(30)\n"
        "    except BaseException: pass  # as an import that swallows everything does\n"
        "print('went on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "carrywave: interrupted\n")


# Streams that are closed.


def closed(streams: str, *words: str) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "carrywave", *words]
    return subprocess.run(shell, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("words", [["schema"], ["predict", "r", "in.jsonl"], ["predict", "r", "in.jsonl", "--devices", "2"]])
def test_a_result_that_nobody_would_see_is_refused(words: list[str]) -> None:
    ended = closed(">&-", *words)
    message = "standard output is closed, so the result would be lost; open it, or pass a file with -o"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"carrywave: {message}\n")


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["> /dev/full", "> /dev/full 2>&1"])
def test_a_display_that_cannot_be_written_does_not_end_a_run(streams: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the carry goes on\n" * 40)
    small = ["model.hidden=4", "model.layers=1", "batch.lanes=2", "batch.steps=8", "train.epochs=1", f"data.cache={tmp_path / 'cache'}"]
    ended = closed(streams, "train", f"data.train={tmp_path / 't.txt'}", *small, "--run", str(tmp_path / "run"), "--device", "cpu")
    said = "carrywave: standard output cannot be written (No space left on device); the run goes on, and its progress is no longer shown\n"
    assert (ended.returncode, ended.stderr) == (0, "" if streams.endswith("1") else said)
    assert (tmp_path / "run" / "weights.safetensors").is_file()


def test_with_all_streams_closed_a_file_holds_what_it_should_alone(tmp_path: Path) -> None:
    assert closed("<&- >&- 2>&-", "schema", "-o", str(tmp_path / "schema.json")).returncode == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == spec_schema()
    mistake = closed("2>&-", "schema", "-o", str(tmp_path))
    assert (mistake.returncode, mistake.stdout) == (2, "")
