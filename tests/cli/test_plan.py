"""`carrywave plan`: what it prints and writes, what it refuses, and that it loads no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from _machines import GIB, machine

from carrywave.cli import plan as planning
from carrywave.cli.main import app
from carrywave.errors import PlanError
from carrywave.plan.plan import resolve
from carrywave.spec.plan_spec import PlanSpec

SMALL = ["model.hidden=128", "model.layers=2", "batch.lanes=8", "batch.steps=32"]
GIVEN = ["--profile", "machine.json", "--facts", "vocabulary=4096"]
DEEP = ["model.hidden=1024", "model.layers=8", "batch.lanes=1", "batch.steps=128"]
CLUSTER = "hosts: 2\ndevices: 4\nprofile: machine.json\nbetween: infiniband-ndr\n"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a test works in, with a profile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARRYWAVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CARRYWAVE_PROFILE", raising=False)
    machine().write(tmp_path / "machine.json")
    return tmp_path


def call(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.stdout, result.stderr


def planned(*words: str) -> str:
    code, out, err = call(*words)
    assert (code, err) == (0, ""), err
    return out


def refused(*words: str) -> str:
    """The message of a command that is refused: one line, fact and remedy, and no file more than before."""
    before = sorted(Path.cwd().rglob("*"))
    code, out, err = call(*words)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert re.fullmatch(r"carrywave: .*\S; \S.*\n", err), err
    assert sorted(Path.cwd().rglob("*")) == before
    return err.removeprefix("carrywave: ").rstrip("\n")


def write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_it_says_all_that_was_asked(work: Path) -> None:
    out = planned(*DEEP, *GIVEN, "--devices", "4", "--json", "plan.json")
    known = json.loads((work / "plan.json").read_text())
    lines = out.splitlines()
    assert lines[0].startswith("for language, 8 layers of 1024, ")
    assert lines[0].endswith("on 4 devices of made up (published)")
    assert lines[2] == known["why"]
    assert known["why"].startswith(f"{known['choice']}: ")
    rows = [line for line in lines if re.match(r"stage \d", line)]
    assert len(rows) == len(known["stages"]) == known["plan"]["stages"] > 1
    assert all(stage["units"] in out for stage in known["stages"])
    assert f"{known['tokens_per_second']:,.0f} tokens/s" in out
    assert f"{known['bubble']:.1%} of the devices' time" in out
    assert f"efficiency  {known['efficiency']:.1%}" in out
    assert all(each["why"] in out for each in known["alternatives"])
    assert len(known["alternatives"]) >= 3
    assert lines[3].startswith("All times are predicted, from figures whose error is not known; ")
    assert known["sent_bytes"] > 0


def test_the_plan_that_it_prints_can_be_pasted_into_the_spec() -> None:
    out = planned(*DEEP, *GIVEN, "--devices", "4", "--json", "plan.json")
    line = out.splitlines()[-1]
    section = yaml.safe_load(line)["plan"]
    known = json.loads(Path("plan.json").read_text())
    assert section == known["plan"]
    found = resolve(PlanSpec.model_validate(section), layers=8, workers=section["replicas"] * section["stages"], lanes=1)
    assert (list(found.cuts), found.chunk_steps) == (section["cuts"], section["chunk_steps"])
    spec = write("spec.yaml", f"model: {{hidden: 1024, layers: 8}}\nbatch: {{lanes: 1, steps: 128}}\n{line}\n")
    again = planned(spec, *GIVEN, "--devices", "4")
    assert "requested, and also the planner's choice" in again
    assert f"step        {_step(out)}" in again


def _step(out: str) -> str:
    found = re.search(r"^step        (.*)$", out, re.MULTILINE)
    assert found is not None
    return found[1]


def test_a_plan_that_the_spec_asks_for_is_predicted_and_compared() -> None:
    out = planned(*DEEP, *GIVEN, "--devices", "4", "plan.stages=2", "plan.replicas=1", "--json", "plan.json")
    known = json.loads(Path("plan.json").read_text())
    assert known["asked"]
    assert known["choice"] == "2 stages, chunks of 16 steps"
    assert f"{known['choice']}: requested; the planner would choose" in out
    assert known["alternatives"][0]["why"].startswith("faster by ")


def test_with_no_spec_it_plans_the_default_run() -> None:
    code, out, err = call("--profile", "machine.json", "--devices", "2")
    assert code == 0, err
    assert out.startswith("for language, 2 layers of 128, ")
    assert "batches of 32 lanes x 64 steps" in out


def test_all_devices_are_used_where_that_is_asked_for() -> None:
    small = ["model.hidden=128", "model.layers=2", "batch.lanes=4", "batch.steps=6", *GIVEN, "--devices", "8", "--json", "plan.json"]
    for words, used in (([], False), (["--all"], True)):
        planned(*small, *words)
        plan = json.loads(Path("plan.json").read_text())["plan"]
        assert (plan["replicas"] * plan["stages"] == 8) == used


def test_a_cluster_is_read_from_a_file() -> None:
    write("c.yaml", CLUSTER)
    out = planned(*SMALL, "--facts", "vocabulary=4096", "--cluster", "c.yaml")
    assert "on 8 devices of made up (published), 2 hosts" in out
    # Figures as people write them, and the profile from the command.
    write("c.yaml", "devices: [1, 3]\nbetween: {latency_seconds: 1e-5, bytes_per_second: 25e9}\n")
    out = planned(*SMALL, *GIVEN, "--cluster", "c.yaml")
    assert "on 4 devices of made up (published), 2 hosts" in out


def test_without_a_profile_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def profile_for(units: Any, **how: Any) -> Any:
        asked.update(how)
        return machine(name="here")

    monkeypatch.delenv("CARRYWAVE_PROFILE", raising=False)
    monkeypatch.setattr(planning, "profile_for", profile_for)
    monkeypatch.setattr(planning, "here", lambda device: 3)
    assert "on 3 devices of here" in planned(*SMALL, "--facts", "vocabulary=50", "--device", "cpu")
    assert (asked["device"], asked["devices"]) == ("cpu", 3)


def test_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "gpus", lambda: ["a", "a"])
    assert planning.here("auto") == planning.here("cuda") == 2
    cores = planning.here("cpu")
    assert cores >= 1
    monkeypatch.setattr(planning, "gpus", lambda: [])
    assert planning.here("auto") == cores
    with pytest.raises(PlanError, match="nvidia-smi found no GPU"):
        planning.here("cuda")


def test_facts_of_a_run_are_enough(work: Path) -> None:
    facts = {"vocabulary": 10, "features": 0, "labels": [], "outputs": 0, "sequences": 0, "steps": 9, "longest": 9, "histogram": [[9, 1]]}
    (work / "run").mkdir()
    (work / "run" / "facts.json").write_text(json.dumps({**facts, "scale": [], "own_model": False, "given_codec": False}))
    for name in ("run", "run/facts.json"):
        planned(*SMALL, "data.train=missing.txt", "--profile", "machine.json", "--facts", name)
    labels = ["task=classification", "batch.tokens=512", "model.hidden=128", "data.train=missing.jsonl"]
    planned(*labels, "--profile", "machine.json", "--facts", "features=12,labels=9,longest=29")
    code, _, err = call(*labels, "model.hidden=16", "--profile", "machine.json", "--facts", "features=12,labels=9,longest=29")
    assert (code, err) == (0, "")


def test_torch_is_not_loaded(work: Path) -> None:
    script = (
        "import sys\nfrom carrywave.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as ended:\n    print(ended.code, 'torch' in sys.modules)\n"
    )
    words = ["plan", "--profile", "machine.json", "--devices", "2", "--json", "a.json"]
    ended = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.splitlines()[-1] == "0 False"


# Refusals.


def test_a_model_that_fits_no_plan_names_what_is_missing_and_what_would_do() -> None:
    machine(memory_bytes=GIB // 2).write(Path("small.json"))
    words = ["model.hidden=1024", "model.layers=4", "--profile", "small.json", "--devices", "1"]
    said = refused(*words, "--facts", "vocabulary=4096")
    assert re.match(r"the model does not fit on 1 device: at best, stage 0 \(encoder, layers 1-4, head\) exceeds the 512 MiB of its", said)
    assert said.endswith("; use a smaller batch.lanes, train.precision=bf16, more devices or a smaller model")


def test_a_plan_asked_for_that_does_not_fit_is_told_what_fits() -> None:
    machine(memory_bytes=GIB).write(Path("small.json"))
    words = ["model.hidden=1024", "model.layers=8", "--profile", "small.json", "--devices", "8", "--facts", "vocabulary=4096"]
    said = refused(*words, "plan.replicas=8", "plan.stages=1")
    assert re.match(
        r"stage 0 of the requested plan \(encoder, layers 1-8, head\) exceeds the 1 GiB of its device by .*; this plan fits: ", said
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "0"], "--devices is 0; use a number >= 1"),
        (["--devices", "-3"], "--devices is -3; use a number"),
        (["--devices", "2", "--cluster", "c.yaml"], "--devices and --cluster both define the devices to train on; use only one of them"),
        (["--devices", "8", "plan.stages=5"], "plan.stages=5, but the model has 4 units"),
        (["--devices", "2", "plan.stages=3"], "replicas=1 x stages=3 needs 3 devices, but the cluster has 2"),
        (["--devices", "2", "plan.replicas=4"], "replicas=4 x stages=1 needs 4 devices"),
        (["--devices", "99", "--all"], "cannot use all 99 devices"),
        (["--json", "none/step.json"], "none/step.json cannot be written: folder none not found"),
        (["--json", "none/plan.json"], "none/plan.json cannot be written: folder none not found"),
        (["--json", "."], ". is a folder"),
        (["--profile", "h999"], "profile h999 not found; "),
        (["--profile", "none.json"], "none.json cannot be read as a profile"),
        (["--facts", "vocabulary"], "vocabulary cannot be read"),
        (["--facts", "vocabulary=many"], "facts vocabulary=many cannot be read"),
        (["--facts", "vocabulary=-4"], "facts vocabulary=-4: vocabulary: Input should be"),
        (["--facts", "vocabulry=4"], "facts vocabulry=4: vocabulry: Unexpected keyword"),
        (["--facts", "steps=4"], "the data has neither tokens nor features"),
        (["model.hiden=3"], "unknown key model.hiden"),
        (["a.yaml", "b.yaml"], "b.yaml is a second spec file"),
    ],
)
def test_bad_words(words: list[str], said: str) -> None:
    given = [] if "--profile" in words else ["--profile", "machine.json"]
    facts = [] if "--facts" in words else ["--facts", "vocabulary=4096"]
    assert said in refused(*SMALL, *given, *facts, *words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "c.yaml is empty; write hosts"),
        ("hosts: [\n", "c.yaml:2: "),
        (CLUSTER + "device: 3\n", "c.yaml: device: unknown key"),
        (CLUSTER.replace("machine.json", "h999"), "profile h999 not found"),
    ],
)
def test_bad_clusters(text: str, said: str) -> None:
    write("c.yaml", text)
    assert said in refused(*SMALL, *GIVEN, "--cluster", "c.yaml")


@pytest.mark.parametrize("text", ["{", "[]", '{"vocabulary": "many"}', '{"vocabulary": true}', '{"labels": 3}', '{"histogram": [[1]]}'])
def test_bad_facts(text: str) -> None:
    write("facts.json", text)
    assert "facts.json" in refused(*SMALL, "--profile", "machine.json", "--facts", "facts.json")


def test_data_that_is_missing_is_told_how_to_plan_without() -> None:
    said = refused(*SMALL, "data.train=missing.txt", "--profile", "machine.json")
    assert "data.train=missing.txt: file not found" in said
    assert said.endswith(", or plan without the data: --facts vocabulary=33278")


def test_auto_is_the_precision_that_all_devices_are_made_for() -> None:
    assert planning._made_for_bf16("h200", "cpu", None)  # the devices planned for count, not those of this machine
    assert not planning._made_for_bf16("machine.json", "cpu", None)
    assert not planning._made_for_bf16(None, "cpu", None)
    write("c.yaml", "devices: 2\n")
    assert planning._made_for_bf16("h200", "cpu", Path("c.yaml"))
    assert not planning._made_for_bf16(None, "cpu", Path("c.yaml"))
