"""Reading a spec: what is right comes through unchanged, what is wrong is one line with the fact and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.errors import SpecError
from carrywave.spec.data_spec import DataSpec
from carrywave.spec.load import dump, load, load_own, parse, set_overrides
from carrywave.spec.model_spec import WIDEST, ModelSpec
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec
from carrywave.spec.task_defaults import FRONT, with_task_defaults
from carrywave.spec.train_spec import TrainSpec

OF_SIGNALS: dict[str, Any] = {"pool": "mean_max", "bidirectional": True, "front": "auto", **FRONT}
OF_CLASSES: dict[str, Any] = {"clip": 1.0, "schedule": "cosine", "warmup": 20, "label_smoothing": 0.1}  # by default
HIDDEN = "use a whole number >= 1, or a list, each item a whole number >= 1"


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    return tmp_path / "spec.yaml"


def refused(path: Path | None, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_at_all_is_the_default() -> None:
    assert load() == load(None, []) == with_task_defaults(Spec())


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "model:\n", "{}", "\ufeffmodel: {hidden: 128}\n"])
def test_files_that_change_nothing(spec_file: Path, text: str) -> None:
    spec_file.write_text(text)
    assert load(spec_file) == with_task_defaults(Spec())


def test_a_whole_file(spec_file: Path) -> None:
    spec_file.write_text(
        "task: classification\n"
        "data: {train: train.jsonl, test: test.jsonl}\n"
        "model: {hidden: [400, 1150], layers: 2, dropout: 0.2, locked: true}\n"
        "batch: {tokens: 2048}\n"
        "train: {optimizer: adam, lr: 3e-3, betas: [0.8, 0.99], epochs: 30, class_weights: {no: 2, 1: 0.5}}\n"
        "plan: {chunk_steps: 16}\n"
    )
    spec = load(spec_file)
    assert spec.model == ModelSpec(hidden=(400, 1150), layers=2, dropout=0.2, locked=True, **OF_SIGNALS)
    assert spec.train == TrainSpec(
        optimizer="adam", lr=0.003, betas=(0.8, 0.99), epochs=30, class_weights={"no": 2.0, "1": 0.5}, **OF_CLASSES
    )
    assert spec.data == DataSpec(train="train.jsonl", test="test.jsonl", tokens="word")
    assert spec.plan == PlanSpec(chunk_steps=16)


@pytest.mark.parametrize(
    ("text", "value"), [("3e-4", 3e-4), ("1e5", 1e5), ("1E+2", 100.0), (".5", 0.5), ("5", 5.0), ("1.5e-3", 1.5e-3), ("1_000", 1000.0)]
)
def test_numbers_are_numbers(text: str, value: float) -> None:
    rate = load(None, [f"train.lr={text}"]).train.lr
    assert rate == value
    assert isinstance(rate, float)


def test_overrides_come_after_the_file_and_later_ones_win(spec_file: Path) -> None:
    spec_file.write_text("model: {hidden: 100, layers: 3}\n")
    spec = load(spec_file, ["model.hidden=200", "train.betas=[0.5, 0.6]", "model.hidden=300", "data.valid=a=b.txt", "train.clip=null"])
    assert spec.model == ModelSpec(hidden=300, layers=3, forget_bias=1.0)
    assert spec.train.betas == (0.5, 0.6)
    assert spec.data.valid == "a=b.txt"


def test_an_override_inside_a_plan_that_is_auto_opens_it(spec_file: Path) -> None:
    spec_file.write_text("plan: auto\n")
    assert load(spec_file, ["plan.stages=2"]).plan == PlanSpec(stages=2)
    assert load(None, ["plan.stages=2"]).plan == PlanSpec(stages=2)
    assert load(None, ["plan.stages=2", "plan=auto"]).plan == "auto"


def test_class_weights_by_override_take_any_name() -> None:
    weights = load(
        None, ["task=tagging", "train.class_weights=balanced", "train.class_weights.a.b=2", "train.class_weights.no=1"]
    ).train.class_weights
    assert weights == {"a.b": 2.0, "no": 1.0}


@pytest.mark.parametrize("text", ["2026-01-31", "2026-13-45", "0o10", "1:30", "yes", "off"])
def test_dates_and_words_are_text_as_they_are_written(text: str) -> None:
    assert load(None, [f"data.train={text}"]).data.train == text


@pytest.mark.parametrize(("text", "value"), [("0x1f", 31), ("0b11", 3), ("1_000", 1000), ("+7", 7), ("1e2", 100), ("010", 10)])
def test_whole_numbers_in_other_forms(text: str, value: int) -> None:
    assert load(None, [f"model.hidden={text}"]).model.hidden == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # keys
        ("model.hiden=3", "unknown key model.hiden; did you mean model.hidden?"),
        ("model.lr=3", "unknown key model.lr; did you mean train.lr?"),
        ("model.units=3", "unknown key model.units; did you mean model.hidden?"),
        ("batch_size=3", "unknown key batch_size; did you mean batch.lanes or batch.tokens?"),
        ("lr=3", "unknown key lr; did you mean train.lr?"),
        ("epoch=3", "unknown key epoch; did you mean train.epochs?"),
        ("zzzz=3", "unknown key zzzz; use one of task, data, model, batch, train, plan"),
        (
            "batch.zzzz=3",
            "unknown key batch.zzzz; use one of batch.lanes, batch.steps, batch.vary, batch.tokens, batch.eval_lanes",
        ),
        ("model", "'model' is not key=value; write for example model.hidden=256"),
        # numbers
        ("model.hidden=0", f"model.hidden is 0; {HIDDEN}"),
        ("model.hidden=[200, 0]", f"model.hidden[1] is 0; {HIDDEN}"),
        ("model.hidden=big", f'model.hidden is "big", which is text; {HIDDEN}'),
        ("model.layers=true", "model.layers is true; use a whole number >= 1"),
        ("model.weight_drop=1", "model.weight_drop is 1; use a number >= 0 and < 1"),
        ("train.lr=-1", "train.lr is -1; use a number > 0"),
        ("train.lr=.nan", "train.lr is nan, which is not finite; use a number > 0"),
        ("train.lr=fast", 'train.lr is "fast", which is text; use a number > 0'),
        ("train.betas=[0.9, 1.5]", "train.betas[1] is 1.5; use a list of 2 numbers, each a number >= 0 and < 1"),
        ("train.seed=9223372036854775808", "train.seed is 9223372036854775808; use a whole number >= 0 and < 2^63"),
        ("train.class_weights={a: 0}", "train.class_weights.a is 0; use balanced, or a mapping of names to values, each a number > 0"),
        # choices, truth values, text
        ("task=laguage", 'task is "laguage"; use one of language, classification, tagging, transcription, forecasting, regression'),
        ("model.locked=yes", 'model.locked is "yes"; use true or false'),
        ("data.train={a: b}", 'data.train is {"a": "b"}; use text'),
        # sections
        (
            "plan=fast",
            'plan is "fast"; use auto, or a section with replicas, stages, chunk_steps, micro_batches, cuts, recompute, kernel, share_head',
        ),
        ("batch=3", "batch is 3; use a section with lanes, steps, vary, tokens, eval_lanes"),
        # what fields say of each other
        ("model.hidden=[1, 2, 3]", "model.hidden lists 3 widths for 2 layers; list one width for each layer"),
        ("data.quantiles=[0.5, 0.1]", "data.quantiles must increase, got [0.5, 0.1]; list each once, from low to high"),
        (
            "batch={lanes: 2, tokens: 8}",
            "batch.tokens is for separate sequences and batch.lanes/batch.steps for streams; set one or the other",
        ),
        # values that are not YAML: shells take quotes off, so none are advised
        ("model.layers=[1", 'model.layers is "[1", which is text; use a whole number >= 1'),
        (
            "model.hidden=!!python/name:os.system",
            "model.hidden=!!python/name:os.system: the tag !!python/name:os.system is not allowed; use plain values only",
        ),
    ],
)
def test_refused_in_one_line(override: str, message: str) -> None:
    assert refused(None, override) == message


@pytest.mark.parametrize(
    "text", [*",;?-|*%@!#:&`", r"\t", "\t", " ", "010", "1:30", "true", "2020-01-01", "a: b", "a #b", "!x", "[a", "{a}.csv"]
)
def test_text_on_the_command_line_is_as_it_stands(text: str) -> None:
    assert set_overrides({}, [f"data.text={text}"]) == {"data": {"text": text}}


@pytest.mark.parametrize(("text", "value"), [("", None), ("null", None), ("'|'", "|"), ('"5"', "5"), (r'"\t"', "\t")])
def test_text_may_be_empty_or_in_quotes(text: str, value: str | None) -> None:
    assert set_overrides({}, [f"data.text={text}"]) == {"data": {"text": value}}


def test_one_name_or_number_is_a_list_of_one() -> None:
    data = load(overrides=["task=forecasting", "data.train=a.csv", "data.targets=load", "data.calendar=hour", "data.bands=0.8"]).data
    assert (data.targets, data.calendar, data.bands) == (("load",), ("hour",), (0.8,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {hidden: 3}\nmodel: {layers: 4}\n", "{path}:2: key model is given twice; remove one of them"),
        ("hello\n", '{path} contains "hello", not a mapping; write keys such as model: {{hidden: 256}}'),
        (
            "x: !!python/object/apply:os.system [touch hacked]\n",
            "{path}:1: the tag !!python/object/apply:os.system is not allowed; use plain values only",
        ),
        ("? [a, b]\n: 3\n", "{path}:1: a key must be plain text; write key: value"),
        ("a: b: c\n", "{path}:1: mapping values are not allowed here; correct the YAML, perhaps by putting text in quotes"),
    ],
)
def test_files_refused_in_one_line(spec_file: Path, text: str, message: str) -> None:
    spec_file.write_text(text)
    assert refused(spec_file) == message.format(path=spec_file)
    assert list(spec_file.parent.iterdir()) == [spec_file]


@pytest.mark.parametrize("text", ["[" * 5000, "model: {hidden: " + "9" * 5000 + "}", "a: \x07", 'data: {train: "\\ud800"}', "a: 'b"])
def test_strange_files_are_refused_in_one_line(spec_file: Path, text: str) -> None:
    spec_file.write_text(text)
    assert ";" in refused(spec_file)


def test_values_from_python() -> None:
    values = {
        "task": "classification",
        "data": DataSpec(train="a.txt"),
        "model": {"hidden": (4, np.int64(8)), "dropout": np.float32(0.5), "pretrained": Path("a.vec")},
        "train": {"class_weights": {0: 1.0, "b": 2}},
        "batch": None,
    }
    spec = parse(values, defaults=False)
    assert spec.data == DataSpec(train="a.txt")
    assert spec.model == ModelSpec(hidden=(4, 8), dropout=0.5, pretrained="a.vec")
    assert spec.train.class_weights == {"0": 1.0, "b": 2.0}


texts = st.text(st.characters(codec="utf-8"), min_size=1)
weights = st.dictionaries(texts, st.floats(min_value=1e-9, allow_infinity=False), max_size=3)
specs = st.builds(
    Spec,
    task=st.sampled_from(["classification", "tagging"]),
    data=st.builds(
        DataSpec,
        train=texts | st.sampled_from(["3e-4", "1e5", "yes", "null", "2026-01-31", "1_0", "~", "0x1f", ".5"]),
        columns=st.lists(texts).map(tuple),
    ),
    model=st.builds(
        ModelSpec,
        hidden=st.integers(1, WIDEST) | st.tuples(st.integers(1, 9), st.integers(1, 9)),
        forget_bias=st.floats(allow_nan=False, allow_infinity=False),
    ),
    train=st.builds(TrainSpec, lr=st.floats(min_value=1e-300, allow_infinity=False), seed=st.integers(0, 2**63 - 1), class_weights=weights),
    plan=st.just("auto") | st.builds(PlanSpec, cuts=st.lists(st.integers(1, 9)).map(tuple)),
)


@pytest.mark.parametrize("lines", [0, 1, 30])
def test_a_run_s_own_spec_that_lost_its_end_is_refused(lines: int, spec_file: Path) -> None:
    spec_file.write_text("".join(dump(Spec()).splitlines(keepends=True)[:lines]))
    with pytest.raises(SpecError, match="is damaged: its end is missing; restore it"):
        load_own(spec_file)


@given(specs)
def test_what_is_dumped_loads_to_an_equal_spec(tmp_path_factory: pytest.TempPathFactory, spec: Spec) -> None:
    path = tmp_path_factory.mktemp("spec") / "spec.yaml"
    path.write_text(dump(spec), encoding="utf-8")
    assert load_own(path) == Spec.model_validate(spec.model_dump())


@pytest.mark.parametrize(
    "override",
    [
        "model.hidden=[1, X",
        "model.hidden=!X 1",
        "model.hidden={X: 1, X: 2}",
        "model.hidden=0X",
        "model.hidden=1:X",
        "X",
        "X=1",
        "model.X=1",
    ],
)
def test_a_long_override_is_not_repeated_in_full(override: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(None, [override.replace("X", "1" * 100 if "{X" in override else "1" * 5000)])
    assert len(str(caught.value)) < 1000  # the keys of a section are listed
