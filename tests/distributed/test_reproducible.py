"""With `train.reproducible` the number of replicas changes no bit: of steps, of whole runs, of runs that go on with another number."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from _cases import Case, Run, changed, errors
from _check import run
from _crew import Crew
from _draw import cases
from _fixed import FLOOR, LIMIT, a_case, a_plan, sequences


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(4) as crew:
        yield crew


@pytest.fixture(scope="module")
def eight() -> Iterator[Crew]:
    with Crew(8) as crew:
        yield crew


def bits(found: Run) -> dict[str, Any]:
    """All of a run that can be compared, exactly."""
    numbers = {"losses": [x.hex() for x in found.losses], "norms": [x.hex() for x in found.norms], "scale": found.scale}
    tensors = {f"gradient {name}": tensor for name, tensor in found.gradients.items()}
    tensors |= {f"weight {name}": tensor for name, tensor in found.weights.items()}
    return numbers | found.digests | {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def differ(one: Run, other: Run) -> list[str]:
    ours, theirs = bits(one), bits(other)
    assert ours.keys() == theirs.keys()
    return [name for name, value in ours.items() if value != theirs[name]]


def on(case: Case, crew: Crew, replicas: int) -> Run:
    return run(changed(case, plan__replicas=replicas), crew)


def streams(lanes: int) -> list[list[dict[str, Any]]]:
    """Four windows in three steps: full ones, and one in which lanes end, are idle, and begin anew."""
    full = {"steps": 6, "lengths": [6] * lanes}
    some = {"steps": 4, "lengths": [(3 * lane) % 5 for lane in range(lanes)]}
    fresh = [lane % 3 == 0 for lane in range(lanes)]
    return [
        [full | {"fresh": [True] * lanes}, some | {"fresh": fresh}],
        [full | {"fresh": [False] * lanes}],
        [full | {"fresh": fresh}],
    ]


def words(lanes: int = 21, **fields: Any) -> Case:
    """A tied model of words with every kind of dropout, learned carries, accumulation, clipping and penalties, in float32."""
    return a_case(groups=streams(lanes), **{"train__precision": "fp32", "train__reproducible": True, "plan": a_plan(), **fields})


def labelled(**fields: Any) -> Case:
    """Sequences in batches of 5 lanes, 1 and 17: in most of them some replicas have none."""
    groups = [
        [{"steps": 5, "lengths": [5, 2, 3, 1, 4], "fresh": [True] * 5}, {"steps": 3, "lengths": [3], "fresh": [True]}],
        [{"steps": 3, "lengths": [2], "fresh": [True]}],
        [{"steps": 4, "lengths": [1 + lane % 4 for lane in range(17)], "fresh": [True] * 17}],
    ]
    return sequences(groups=groups, **{"train__precision": "fp32", "train__reproducible": True, "plan": a_plan(), **fields})


CASES = {
    "words": words(),
    "few lanes": words(5),
    "fp64": words(train__precision="fp64"),  # of float32 numbers, a sum in float64 is often exact, in whatever order
    "in chunks": words(plan=a_plan(chunk_steps=2)),
    "recomputed": words(plan=a_plan(chunk_steps=4, recompute=True)),
    "bf16": words(train__precision="bf16"),
    "fp16": words(train__precision="fp16"),
    "numbers": words(task="forecasting", model__numbers=True, model__own_encoder=True, model__tie=False, train__optimizer="sgd"),
    "another cell": words(model__cell="rnn"),
    "gru": words(model__cell="gru", plan=a_plan(chunk_steps=2)),
    "sequences": labelled(),
    "both ways": labelled(task="tagging", model__bidirectional=True, model__learned_carry=False, model__class_weights=True),
}
PIPELINES = {
    "stages": a_plan(stages=2, cuts=[2], chunk_steps=2),
    "head shared": a_plan(stages=2, cuts=[2], chunk_steps=2, share_head=True),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_replicas_change_no_bit(case: str, crew: Crew) -> None:
    alone = on(CASES[case], crew, 1)
    assert all(alone.finite)
    for replicas in (2, 4) if case in ("words", "sequences") else (4,):
        assert differ(alone, on(CASES[case], crew, replicas)) == [], replicas


@pytest.mark.parametrize("plan", PIPELINES)
def test_replicas_of_a_pipeline_change_no_bit(plan: str, crew: Crew) -> None:
    """The tied matrix, and with a shared head all of it, is summed over the stages as well."""
    case = words(plan=PIPELINES[plan])
    assert differ(on(case, crew, 1), on(case, crew, 2)) == []


def test_replicas_do_change_bits_otherwise(crew: Crew) -> None:
    """Or the tests above would show nothing."""
    case = words(train__reproducible=False)
    assert differ(on(case, crew, 1), on(case, crew, 2)) != []


@pytest.mark.parametrize("case", [words(train__precision="fp64"), labelled(train__precision="fp64")], ids=["words", "sequences"])
def test_the_answer_is_that_of_any_other_run(case: Case, crew: Crew) -> None:
    found = errors(on(case, crew, 2), on(changed(case, train__reproducible=False), crew, 1), floor=FLOOR)
    worst = max(found, key=found.__getitem__)
    assert found[worst] < LIMIT, f"{worst} is off by {found[worst]:.2g}"


def drawn(crew: Crew, examples: int, replicas: tuple[int, ...]) -> None:
    @settings(max_examples=examples)
    @given(case=cases(4, precision="fp32").filter(lambda case: case["plan"]["replicas"] == 4))
    def each(case: Case) -> None:
        plan = a_plan(chunk_steps=case["plan"]["chunk_steps"], recompute=case["plan"]["recompute"])
        case = changed(case, plan=plan, train__reproducible=True)
        alone = on(case, crew, 1)
        for number in replicas:
            assert differ(alone, on(case, crew, number)) == [], number

    each()


@pytest.mark.slow
def test_replicas_change_no_bit_of_any_case(crew: Crew) -> None:
    drawn(crew, 4, (2, 4))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_replicas_change_no_bit_of_many_cases(crew: Crew) -> None:
    drawn(crew, 100, (2, 4))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [name for name in CASES if name != "few lanes"])  # a stream needs a lane for each replica
def test_eight_replicas_change_no_bit(case: str, eight: Crew) -> None:
    assert differ(on(CASES[case], eight, 1), on(CASES[case], eight, 8)) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", [*PIPELINES.values(), a_plan(stages=4, cuts=[1, 2, 3], chunk_steps=1, share_head=True)])
def test_replicas_of_longer_pipelines_change_no_bit(plan: dict[str, Any], eight: Crew) -> None:
    case = words(plan=plan)
    alone = on(case, eight, 1)
    for replicas in (2, 4):
        if replicas * plan["stages"] <= 8:
            assert differ(alone, on(case, eight, replicas)) == [], replicas


Carrywave = Callable[..., CompletedProcess[str]]


def specs(folder: Path) -> dict[str, dict[str, Any]]:
    (folder / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 16)
    draw = np.random.default_rng(3)
    for name, rows in (("train", 40), ("test", 11)):
        steps = [draw.normal(size=(int(draw.integers(1, 10)), 2)).round(3) for _ in range(rows)]
        lines = [json.dumps({"steps": each.tolist(), "label": round(float(each.sum()), 3)}) for each in steps]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return {
        # The rate follows the validation loss, and so do the best weights and the end: one bit there may change the whole run.
        "language": {
            "data": {"train": "text.txt", "tokens": "char"},
            "model": {"hidden": 16, "layers": 2, "dropout": 0.3, "tie": True},
            "batch": {"lanes": 11, "steps": 6},
            "train": {"lr": 0.02, "clip": 0.5, "epochs": 2, "log_every": 5, "evaluate_every": 5, "schedule": "plateau", "early_stop": 9},
        },
        # Float metrics are sums, too.
        "regression": {
            "task": "regression",
            "data": {"train": "train.jsonl", "test": "test.jsonl"},
            "model": {"hidden": 8, "layers": 2, "dropout": 0.2, "pool": "mean"},
            "batch": {"tokens": 40},
            "train": {"lr": 0.02, "epochs": 2, "log_every": 3, "accumulate": 2},
        },
    }


@pytest.fixture
def carrywave(python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Carrywave:
    """The command, with the number of threads left to it: alone it would take all, and of two workers each the half."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, spec in specs(tmp_path).items():
        spec["train"]["reproducible"] = True
        (tmp_path / f"{name}.yaml").write_text(json.dumps(spec))

    def run(*words: str, code: int = 0) -> CompletedProcess[str]:
        ended: CompletedProcess[str] = python("-m", "carrywave", "train", *words, "--device", "cpu")
        assert ended.returncode == code, ended.stderr
        return ended

    return run


def files(run: Path) -> list[str]:
    return [hashlib.sha256((run / name).read_bytes()).hexdigest() for name in ("weights.safetensors", "metrics.jsonl")]


def tensors(run: Path) -> list[str]:
    """The same of a run that was stopped by another spec, which stands beside the weights."""
    named = load_file(run / "weights.safetensors")
    weights = hashlib.sha256(b"".join(named[name].numpy().tobytes() for name in sorted(named))).hexdigest()
    return [weights, hashlib.sha256((run / "metrics.jsonl").read_bytes()).hexdigest()]


@pytest.mark.slow
def test_whole_runs_are_equal_to_the_byte(carrywave: Carrywave, tmp_path: Path) -> None:
    said = [carrywave("regression.yaml", "--devices", str(devices), "--run", f"on-{devices}").stdout for devices in (1, 2)]
    assert files(tmp_path / "on-1") == files(tmp_path / "on-2")
    assert all("times as long" in text for text in said)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_to_the_byte(carrywave: Carrywave, tmp_path: Path) -> None:
    carrywave("language.yaml", "--devices", "1", "--run", "through")
    carrywave("language.yaml", "--devices", "2", "--run", "changed", "train.max_steps=10")
    carrywave("language.yaml", "--devices", "1", "--run", "changed", "--resume")
    assert tensors(tmp_path / "through") == tensors(tmp_path / "changed")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["language", "regression"])
def test_whole_runs_of_more_are_equal_to_the_byte(name: str, carrywave: Carrywave, tmp_path: Path) -> None:
    for devices in (1, 2, 4, 8):
        carrywave(f"{name}.yaml", "--devices", str(devices), "--run", f"on-{devices}")
        assert files(tmp_path / "on-1") == files(tmp_path / f"on-{devices}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_with_any_number_to_the_byte(carrywave: Carrywave, tmp_path: Path) -> None:
    """Two workers as stages, then as replicas of two stages: the stages are the same, and so are the bits."""
    stages = ("plan.stages=2", "plan.chunk_steps=3")
    carrywave("language.yaml", *stages, "--devices", "2", "--run", "through")
    for number, (first, second) in enumerate([(2, 4), (4, 8), (8, 2)]):
        name = f"changed-{number}"
        carrywave("language.yaml", *stages, "--devices", str(first), "--run", name, "train.max_steps=10")
        carrywave("language.yaml", *stages, "--devices", str(second), "--run", name, "--resume")
        assert tensors(tmp_path / "through") == tensors(tmp_path / name)
