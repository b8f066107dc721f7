"""Bad input, through the command line: one line that says the fact and the remedy, exit 2, and nothing left behind.

Each test works in a folder of its own. Whatever stands in it before a refused command must be there after it, byte for byte,
and nothing else; in the cache of parsed data no draft may remain.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import _whole_snapshots
from carrywave.cli.main import app
from carrywave.runs.checkpoint import atomic_files, snapshot
from carrywave.tasks.task import Task

TEXT = "the cat sat on the mat\nthe dog ate the log\n" * 8
ROWS = [{"steps": [[0.1 * i, -0.2 * i], [0.3, 0.1 * i]], "label": "up" if i % 2 else "down"} for i in range(12)]
TINY = ["model.hidden=4", "model.layers=1", "train.epochs=2", "train.lr=0.01"]
LANGUAGE = ["data.train=train.txt", "batch.lanes=4", "batch.steps=8", *TINY]
LABELS = ["task=classification", "data.train=train.jsonl", "batch.tokens=32", *TINY]
SERIES = ["task=forecasting", "data.train=train.csv", "data.horizon=2", "batch.lanes=1", "batch.steps=8", *TINY]
TABLE = "ds,y,x\n" + "".join(f"2024-01-{day:02d},{day % 5}.5,{day}\n" for day in range(1, 29))


def call(*words: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stderr, result.exception


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file under a folder with its bytes, and every folder; of the cache, drafts alone."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items() if not re.match("cache/[^.]", name)}


def one_line(code: int, err: str, expected: int = 2) -> str:
    """The message, of the form that every refusal has: fact, then remedy."""
    assert code == expected, err
    assert err.startswith("carrywave: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    message = err.removeprefix("carrywave: ").rstrip("\n")
    assert re.search(r"\S; \S", message), f"no remedy: {message}"
    return message


def refused(*words: str, expected: int = 2) -> str:
    """The message of a command that is refused in this folder and leaves it as it was."""
    before = contents(Path.cwd())
    code, err, fault = call(*words)
    assert isinstance(fault, SystemExit), err
    message = one_line(code, err, expected)
    assert contents(Path.cwd()) == before
    return message


def write(name: str, content: str | bytes | list[Any]) -> None:
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a test works in, with good data to train on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARRYWAVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    write("train.txt", TEXT)
    write("train.jsonl", ROWS)
    write("train.csv", TABLE)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a language model and of a classifier, in the folder with their data; copied for each test that spoils one."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CARRYWAVE_CACHE", str(folder / "cache"))
        write("train.txt", TEXT)
        write("train.jsonl", ROWS)
        for name, words in (("run", LANGUAGE), ("labels", LABELS)):
            assert call("train", *words, "--run", name, "--device", "cpu")[:2] == (0, "")
    return folder


@pytest.fixture
def run(trained: Path, work: Path) -> Path:
    """A run of a language model, to be spoilt."""
    shutil.copytree(trained / "run", work / "run")
    return Path("run")


@pytest.fixture
def labels(trained: Path, work: Path) -> Path:
    """A run of a classifier, to be spoilt."""
    shutil.copytree(trained / "labels", work / "labels")
    return Path("labels")


# Data.

NAN = float("nan")
STEPS: dict[str, tuple[Any, str]] = {
    "nan": ([[0, 1], [1, NAN]], "valid.jsonl:2: step 1, column 1 of steps is nan, not a finite number (below 1e25); fill the gap"),
    "ragged": ([[0, 1], [1]], "valid.jsonl:2: steps cannot be read as numbers (setting an array element with a sequence."),
    "features": ([[0, 1, 2]], "valid.jsonl:2: a step has 3 numbers in steps, but others have 2; use 2 in every step"),
}


@pytest.mark.parametrize("case", STEPS)
def test_bad_steps(case: str, labels: Path) -> None:
    steps, message = STEPS[case]
    write("valid.jsonl", [ROWS[0], {"steps": steps, "label": "up"}])
    assert refused("train", *LABELS, "data.valid=valid.jsonl").startswith(message)
    assert refused("evaluate", str(labels), "--data", "valid.jsonl").startswith(message)
    assert refused("predict", str(labels), "valid.jsonl", "-o", "out.jsonl").startswith(message)


DATA: dict[str, tuple[list[str], str | bytes | list[Any], str]] = {
    "no file": ([*LANGUAGE, "data.valid=none.txt"], "", "data.valid=none.txt: file not found in {cwd}; use the path of an existing file"),
    "empty text": ([*LANGUAGE, "data.train=bad"], "", "bad is empty; use a file that contains text"),
    "empty rows": ([*LABELS, "data.train=bad", "data.format=jsonl"], "\n\n", "bad is empty; use data with at least one row"),
    "empty table": (
        [*SERIES, "data.train=bad", "data.format=csv"],
        "",
        "bad is empty; use a table with at least one row",
    ),
    "not utf-8": (
        [*LANGUAGE, "data.train=bad", "data.encoding=utf-8"],
        b"the \xff",
        "bad is not text in utf-8 (byte 4); set data.encoding to the encoding it was written in",
    ),
    "no label": (
        [*LABELS, "data.valid=bad", "data.format=jsonl"],
        [{"steps": [[1, 2]]}],
        "bad has no row with a sequence and a target (a row has steps); set data.text and data.label",
    ),
    "nothing labelled": (
        [*LABELS, "task=tagging", "data.train=bad2.jsonl", "data.valid=bad", "data.format=jsonl"],
        [{"tokens": [1], "labels": [None]}],
        "valid contains no targets: every label in it is ignored; add labels",
    ),
    "no column": (
        [*SERIES, "data.targets=[z]"],
        "",
        "train.csv has no column 'z' (data.targets); use one of ds, y, x",
    ),
    "short series": (
        [*SERIES, "data.train=bad", "data.format=csv"],
        "ds,y\n2024-01-01,1\n",
        "bad: series bad has 0 rows in train, but a horizon of 2 needs 3; reduce data.horizon, or add rows to train",
    ),
    "short gzip of rows": (
        [*LABELS, "data.train=bad.jsonl.gz"],
        gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode())[:-8],
        "bad.jsonl.gz cannot be read (Compressed file ended before the end-of-stream marker was reached); check that the file is complete",
    ),
    "more lanes than tokens": (
        [*LANGUAGE, "data.train=bad", "data.share=0", "batch.lanes=40"],
        "the cat",
        "batch.lanes=40 is more than the 6 steps",
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_bad_data(case: str, work: Path) -> None:
    words, content, message = DATA[case]
    name = next((word.partition("=")[2] for word in words if "=bad" in word and "bad2" not in word), "bad")
    write(name, content)
    write("bad2.jsonl", [{"tokens": [6, 1], "labels": ["a", "b"]}])
    assert refused("train", *words, "--run", "new").startswith(message.format(cwd=work))


# The spec.

SPEC: dict[str, tuple[list[str], str]] = {
    "unknown key": (["model.hiden=3"], "unknown key model.hiden; did you mean model.hidden?"),
    "text for a number": (["model.hidden=many"], 'model.hidden is "many", which is text; use a whole number >= 1'),
    "nan lr": (["train.lr=.nan"], "train.lr is nan, which is not finite; use a number > 0"),
    "stages": (["plan.stages=4"], "plan.stages=4, but the model has 3 units (encoder, 1 layer, head); use plan.stages <= 3"),
    "micro_batches": (
        ["plan.micro_batches=5"],
        "batch.lanes=4 cannot be divided among plan.replicas=1 x plan.micro_batches=5; use batch.lanes >= 5",
    ),
    "tie": (["model.tie=true", "model.embedding=3"], "model.tie needs an embedding as wide as the last layer, got 3 and 4; set"),
    "bidirectional": (["model.bidirectional=true"], "model.bidirectional cannot read a stream backwards; use separate sequences"),
    "python tag": (["tag.yaml"], "tag.yaml:1: the tag !!python/object/apply:os.system is not allowed; use plain values only"),
    "long name": (["data.train=" + "x" * 5000], f"the name {'x' * 60}… is too long for this system; use a shorter one"),
    "no YAML": (["no.yaml"], "no.yaml:3: expected ',' or ']'"),
}


@pytest.mark.parametrize("case", SPEC)
def test_bad_spec(case: str) -> None:
    words, message = SPEC[case]
    write("wide.vec", "t 1 2 3 4 5\n")
    write("tag.yaml", "task: !!python/object/apply:os.system [touch hacked]\n")
    write("no.yaml", "model:\n  {hidden: [1\n")
    assert refused("train", *LANGUAGE, *words, "--run", "new").startswith(message)


def test_a_model_that_is_larger_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "model", lambda *_: torch.empty(2**46))  # more than any machine can address
    assert refused("train", *LANGUAGE, expected=74).startswith("not enough memory (")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, labels: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "device cuda was requested, but no GPU is available; use --device cpu"
    assert refused("train", *LANGUAGE, "--device", "cuda") == message
    assert refused("evaluate", str(labels), "--device", "cuda") == message


# Run folders and snapshots.

OTHER = "resume from another snapshot or start a new run"


def last(run: Path) -> Path:
    return snapshot.last(run / "snapshots")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def rewrite(run: Path, change: Callable[[_whole_snapshots.Snapshot], _whole_snapshots.Snapshot]) -> None:
    """The same snapshot with something else in it, sound in itself."""
    _whole_snapshots.save(run / "snapshots", 99, change(_whole_snapshots.load(run / "snapshots")))


def without(name: str) -> Callable[[_whole_snapshots.Snapshot], _whole_snapshots.Snapshot]:
    return lambda old: replace(old, meta={key: value for key, value in old.meta.items() if key != name})


SNAPSHOTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda run: cut(last(run)), f"step-.*safetensors is not a valid safetensors file .*; {OTHER}"),
    "bit": (lambda run: flip(last(run), -3), f"step-.*safetensors is damaged: its SHA-256 does not match; {OTHER}"),
    "missing": (lambda run: last(run).unlink(), "last does not name a snapshot in its folder; replace its content"),
    "other dtype": (
        lambda run: rewrite(run, lambda old: replace(old, parameters={k: v.double() for k, v in old.parameters.items()})),
        r"\[15, 4\] torch.float64 for encoder.weight, but the model has \[15, 4\] torch.float32; ",
    ),
    "no optimizer": (lambda run: rewrite(run, lambda old: replace(old, optimizer={})), "the snapshot has no optimizer state .*; resume"),
    "no progress": (lambda run: rewrite(run, without("progress")), f"the snapshot was not written by this version .*; {OTHER}"),
    "no snapshots": (lambda run: shutil.rmtree(run / "snapshots"), "run/snapshots has no snapshot; remove --resume"),
    "no logs": (lambda run: (run / "metrics.jsonl").unlink(), "run/metrics.jsonl is shorter than when the snapshot was made; restore the"),
    "data": (
        lambda run: write("train.txt", TEXT.replace("log", "fog")),
        "the data has changed since the snapshot was .*train.txt.*; restore",
    ),
}


@pytest.mark.parametrize("case", SNAPSHOTS)
def test_bad_snapshots(case: str, run: Path) -> None:
    spoil, message = SNAPSHOTS[case]
    spoil(run)
    assert re.search(message, refused("train", "--resume", "--run", "run", "train.epochs=3"))


RESUME: dict[str, tuple[list[str], str]] = {
    "no run": ([], "--resume needs a run folder; pass --run DIR"),
    "no folder": (["--run", "none"], "none has no run to resume (no spec.yaml); correct --run, or remove --resume to start a new run"),
    "layers": (
        ["--run", "run", "model.layers=2"],
        "the run was started with model.layers=1, not 2; keep the old value, or start a new run",
    ),
    "seed": (["--run", "run", "train.seed=2"], "the run was started with train.seed=1, not 2; keep the old value, or start a new run"),
}


@pytest.mark.parametrize("case", RESUME)
def test_what_cannot_be_resumed(case: str, run: Path) -> None:
    words, message = RESUME[case]
    assert refused("train", "--resume", *words).startswith(message)


def test_a_run_that_is_there(run: Path) -> None:
    assert refused("train", *LANGUAGE, "--run", "run") == (
        "run already exists and is not empty; use --resume to continue it, or use another --run"
    )
    assert refused("train", *LANGUAGE, "--run", "train.txt") == "train.txt is a file, but a run must be a folder; use another --run"
    Path("link").symlink_to("nowhere")
    for place, fact in (
        ("train.txt/run", "Not a directory"),
        ("link/run", "File exists"),
    ):
        assert refused("train", *LANGUAGE, "--run", place).startswith(f"the run's folder {place} cannot be created: {fact}")


# Weights.


def tamper(path: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    """Other tensors in the same file, as another program would write them."""
    save_file(dict(change(load_file(path))), path, atomic_files.read_metadata(path))


NOT_VALID = r"is not a valid safetensors file \(.*\); copy it again, or use another file"
WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut, NOT_VALID),
    "pickle": (
        lambda path: torch.save({"a": torch.zeros(2)}, path),
        r"is a pickle \(torch.save\), which can run code when it is loaded; convert",
    ),
    "bit": (lambda path: flip(path, -3), "is damaged: its SHA-256 does not match; copy it again, or use another file"),
    "nan": (lambda path: tamper(path, lambda old: {k: v * NAN for k, v in old.items()}), ": .* is not finite; use other weights"),
    "layers": (
        lambda path: tamper(path, lambda old: old | {"lstm.weight_ih_l1": torch.zeros(2)}),
        "is from another model: it has lstm.weight_ih_l1, which this model does not; use the weights of a model with the same spec",
    ),
    "missing": (Path.unlink, "--init run: run or weights file not found; pass|run has no weights.safetensors yet; train it"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_bad_weights(case: str, run: Path) -> None:
    spoil, message = WEIGHTS[case]
    spoil(run / "weights.safetensors")
    for words in (["train", *LANGUAGE, "--init", "run", "--run", "new"], ["evaluate", "run"], ["predict", "run", "--prompt", "the"]):
        told = refused(*words)
        assert re.search(message, told)
        assert "run" in told


def test_weights_of_another_task(labels: Path) -> None:
    message = "task=language, but the codec is for classification; start from a run of the same task"
    assert refused("train", *LANGUAGE, "--init", "labels", "--run", "new") == message


# A run that is opened again.


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "codec gone": (lambda run: (run / "codec.json").unlink(), "run/codec.json cannot be read: No such file or directory; pass a complete"),
    "codec tokens": (lambda run: edit(run / "codec.json", vocabulary=["ab"]), "run/codec.json does not match the codec that "),
    "codec task": (
        lambda run: edit(run / "codec.json", task="tagging"),
        "run/codec.json is for tagging, text by char, but run/spec.yaml has task=language",
    ),
    "spec gone": (lambda run: (run / "spec.yaml").unlink(), "run is not a run: it has no spec.yaml; pass a run folder"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_run(case: str, run: Path) -> None:
    spoil, message = DAMAGED[case]
    spoil(run)
    for words in (["evaluate", "run"], ["predict", "run", "--prompt", "the"]):
        assert refused(*words).startswith(message)


def test_a_spec_that_was_edited(run: Path) -> None:
    spec = run / "spec.yaml"
    spec.write_text(spec.read_text().replace("hidden: 4", "hidden: 5"))
    message = (
        r"run/weights.safetensors is from another model: .* has shape \[.*\], expected \[.*\]; "
        "use the weights of a model with the same spec"
    )
    assert re.fullmatch(message, refused("evaluate", "run"))


PREDICT: dict[str, tuple[list[str], str]] = {
    "no input": (["labels"], "predict needs an INPUT file for a classification model; pass it after the run folder"),
    "no file": (["labels", "none.jsonl"], "none.jsonl: file not found in "),
    "prompt": (
        ["labels", "train.jsonl", "--prompt", "a"],
        "--prompt needs a language model, but labels is a classification model; pass an INPUT",
    ),
    **{
        option: (["labels", "train.jsonl", option, value], f"{option} is for language models, but labels is a classification model")
        for option, value in (("--top-k", "2"), ("--top-p", "0.5"), ("--temperature", "2"), ("--tokens", "2"))
    },
    "both": (["run", "prompts.txt", "--prompt", "cat"], "--prompt and INPUT cannot be combined; pass only one of them"),
}


@pytest.mark.parametrize("case", PREDICT)
def test_what_cannot_be_predicted(case: str, run: Path, labels: Path) -> None:
    words, message = PREDICT[case]
    write("prompts.txt", "cat\ndog?\n")
    write("prompts.jsonl", '{"text": "cat"}\n{"text"\n')
    write("empty.txt", "")
    assert refused("predict", *words, *(["--tokens", "3"] if words[0] == "run" else [])).startswith(message)


# The cache of parsed data.


@pytest.mark.parametrize(
    "spoil",
    [lambda entry: (entry / "0.npy").unlink(), lambda entry: cut(entry / "0.npy"), lambda entry: (entry / "content.json").write_text("{")],
    ids=["missing", "truncated", "content"],
)
def test_a_cache_that_is_damaged(spoil: Callable[[Path], object], work: Path) -> None:
    assert call("train", *LANGUAGE, "--dry-run")[:2] == (0, "")
    [entry] = (path.parent for path in (work / "cache").glob("*/content.json"))
    spoil(entry)
    assert refused("train", *LANGUAGE) == f"the cache {entry} is damaged; delete the folder {entry}"


# The disk.


class Disk:
    """A disk on which syncing fails where a path matches; as a full one does, or one that is read-only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.sync = monkeypatch, os.fsync

    def full(self, where: str) -> None:
        def fsync(handle: int) -> None:
            path = os.readlink(f"/proc/self/fd/{handle}")
            if re.search(where, path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.sync(handle)

        self.patch.setattr(os, "fsync", fsync)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("paths of open files cannot be told here")
    return Disk(monkeypatch)


FULL = "No space left on device"


def test_of_the_data_the_file_that_has_changed_is_named() -> None:
    words = [*LANGUAGE, "data.valid=valid.txt"]
    write("valid.txt", TEXT[:80])
    assert call("train", *words, "--run", "run")[0] == 0
    for changed in ("valid.txt", "train.txt"):
        kept = Path(changed).read_bytes()
        write(changed, kept.replace(b"cat", b"act"))
        message = refused("train", "--resume", "--run", "run", "train.epochs=3")
        assert message.startswith(f"the data has changed since the snapshot was written ({changed}); restore the old data")
        write(changed, kept)
    assert call("train", "--resume", "--run", "run", "train.epochs=3")[0] == 0


MADE = ("weights.safetensors", "metrics.jsonl", "spec.yaml", "plan.json", "codec.json", "facts.json")


@pytest.mark.parametrize("file", ["spec.yaml", "metrics.jsonl", "weights.safetensors", "snapshots/"])
def test_a_full_disk_ends_a_new_run_with_one_line_and_the_same_command_begins_it_anew(file: str, disk: Disk) -> None:
    words = ["train", *LANGUAGE, "train.log_every=1"]
    assert call(*words, "--run", "straight")[0] == 0
    disk.full(rf"new/\.?{re.escape(file)}")
    code, err, _ = call(*words, "--run", "new")
    assert f"could not be written: {FULL}; " in one_line(code, err, 74)
    assert not [path.name for path in Path("new").rglob("*.tmp")]
    assert not Path("new/owner.json").exists()
    disk.full("nowhere")
    if Path("new/weights.safetensors").exists():  # it may be all that is left of a long run
        assert refused(*words, "--run", "new").startswith("new already exists and is not empty; use --resume")
        Path("new/weights.safetensors").unlink()
    assert call(*words, "--run", "new")[:2] == (0, "")
    assert {name: Path("new", name).read_bytes() for name in MADE} == {name: Path("straight", name).read_bytes() for name in MADE}


def test_a_run_from_other_weights_begins_anew_from_them(disk: Disk) -> None:
    assert call("train", *LANGUAGE, "--run", "first")[0] == 0
    for name in ("straight", "new"):
        disk.full(r"new/\.weights")
        assert call("train", *LANGUAGE, "--run", name, "--init", "first")[0] == (74 if name == "new" else 0)
    disk.full("nowhere")
    assert call("train", "--resume", "--run", "new")[:2] == (0, "")
    assert Path("new/weights.safetensors").read_bytes() == Path("straight/weights.safetensors").read_bytes()


@pytest.mark.parametrize("where", [r"snapshots/\.step", "snapshots/.last", r"run/\.weights"])
def test_no_room_keeps_what_was_there(where: str, run: Path, disk: Disk) -> None:
    before = contents(run)
    edit_spec = ["train.epochs=4", "train.keep=9"]
    disk.full(where)
    code, err, _ = call("train", "--resume", "--run", "run", *edit_spec)
    assert FULL in one_line(code, err, 74)
    after = contents(run)
    assert {name: data for name, data in before.items() if name.startswith("snapshots")}.items() <= after.items()
    assert "run/weights.safetensors could not be written" in err or after["weights.safetensors"] is not None
    assert not [name for name in after if "tmp" in name]
    if "weights" in where:
        assert after["weights.safetensors"] == before["weights.safetensors"]
    disk.patch.setattr(os, "fsync", disk.sync)
    assert call("train", "--resume", "--run", "run", *edit_spec)[:2] == (0, "")


def test_no_room_for_the_cache(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("carrywave.data.files.cache.np.save", full)
    message = (
        f"the cache {work}/cache cannot be written (No space left on device); free disk space, or set $CARRYWAVE_CACHE to another folder"
    )
    assert refused("train", *LANGUAGE, expected=74) == message


def test_no_room_for_predictions(run: Path, disk: Disk) -> None:
    write("out.jsonl", "old\n")
    disk.full(r"out.jsonl|/#\d+ \(deleted\)")  # it has no name yet
    message = f"out.jsonl could not be written: {FULL}; free disk space, or use another path"
    assert refused("predict", "run", "--prompt", "the", "-o", "out.jsonl", expected=74) == message


def test_names_and_labels_that_are_no_text(run: Path) -> None:
    name = os.fsdecode(b"in\xff.txt")
    assert refused("train", *LANGUAGE, "--run", name).startswith(r"the folder name in\udcff.txt is not valid UTF-8; use another --run")
    write("half.jsonl", [{**row, "label": "\ud83d" if row["label"] == "up" else "b"} for row in ROWS])
    assert "; " in refused("train", *LABELS, "data.train=half.jsonl", "--run", "half")  # a fact, and a remedy


# As processes of their own: what a shell sees.


def test_a_process(run: Path, work: Path) -> None:
    cut(run / "weights.safetensors")
    before = contents(work)
    ended = subprocess.run([sys.executable, "-m", "carrywave", "evaluate", "run"], capture_output=True, text=True, timeout=120)
    assert one_line(ended.returncode, ended.stderr).startswith("run/weights.safetensors is not a valid safetensors file (")
    assert contents(work) == before


@pytest.mark.slow
def test_a_process_that_may_not_write_large_files(work: Path) -> None:
    """A limit of the system's own, met in mid-run: weights of 40 kB where a file may have 16 kB."""
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384)); from carrywave.cli.main import main; main()"
    words = ["train", *LANGUAGE, "model.hidden=48", "--run", "new"]
    ended = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120)
    message = one_line(ended.returncode, ended.stderr, 74)
    assert re.match(r"snapshot new/snapshots/step-\d+ could not be written: File too large; .*; raise the limit of file sizes", message)
    assert Path("new/metrics.jsonl").stat().st_size > 0
    assert not Path("new/weights.safetensors").exists()
