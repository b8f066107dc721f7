"""The files that `carrywave launch` writes: what is in them, what is refused, and whether a cluster would take them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from carrywave.errors import PlanError, UserError
from carrywave.launch.job_files import Job, for_kubernetes, for_skypilot, for_slurm, name_for, seconds_of
from carrywave.spec.plan_spec import PlanSpec

JOB = Job(
    name="words",
    spec="my words.yaml",
    overrides=("train.lr=0.5",),
    run="runs/words",
    nodes=2,
    devices=4,
    cpus=3,
    on_gpus=True,
    seconds=7200,
)
CPU = replace(JOB, on_gpus=False)


@pytest.mark.parametrize(
    ("text", "seconds"), [("300s", 300), ("90m", 5400), ("12h", 43_200), ("2d", 172_800), ("0:05:30", 330), ("1-12:00:00", 129_600)]
)
def test_times(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "12", "1:30", "h", "-3h", "1.5h", "1-2", "10:99:00", "²h"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UserError, match="is not a time limit; write it like 90m, 12h, 2d or 1-12:00:00"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("spec", "name"),
    [("a/My Words_2.yaml", "my-words-2"), (None, "language"), ("3.yaml", "run-3"), ("---.yaml", "run"), ("x" * 99, "x" * 50)],
)
def test_names(spec: str | None, name: str) -> None:
    assert name_for(spec, "language") == name
    assert replace(JOB, name=name).name == name  # the checks of a job take it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "My Job"}, "--name My Job is not a name for a job; use at most 50 lower-case letters"),
        ({"nodes": 0}, "--nodes is 0; use a number >= 1"),
        ({"devices": -1}, "--devices is -1; use a number >= 1"),
        ({"cpus": 0}, "--cpus is 0; use a number >= 1"),
        ({"seconds": 60}, "--time is 60 s, of which the last 120 s are kept for a snapshot; use a longer time"),
        ({"on_gpus": False, "gpu": "a100"}, "--gpu a100 asks for GPUs and --device cpu for none; use only one"),
    ],
)
def test_what_a_job_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(JOB, **change)


def test_a_plan_that_does_not_fit_the_nodes() -> None:
    JOB.check_plan(PlanSpec(stages=4))
    JOB.check_plan(PlanSpec(replicas=2, stages=4))
    with pytest.raises(PlanError, match=r"plan.replicas=2 x plan.stages=3 does not fit --nodes 2 x --devices 4 = 8 workers"):
        JOB.check_plan(PlanSpec(replicas=2, stages=3))
    with pytest.raises(PlanError, match=r"plan.stages=3 does not fit --nodes 2 x --devices 4 = 8 workers"):
        JOB.check_plan(PlanSpec(stages=3))


def options(script: str) -> dict[str, str]:
    """The options for sbatch in a script."""
    words = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_a_batch_script() -> None:
    text = for_slurm(JOB)
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert options(text) == {
        "job-name": "words",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "12",
        "gpus-per-node": "4",
        "time": "0-02:00:00",
        "signal": "B:USR1@120",
        "output": "%x-%j.log",
        "open-mode": "append",
        "requeue": "",
    }
    assert "carrywave train 'my words.yaml' train.lr=0.5 --run runs/words --continue --devices 4 &" in text
    cpu = for_slurm(replace(CPU, seconds=None))
    assert not {"gpus-per-node", "time"} & set(options(cpu))
    assert "--devices 4 --device cpu &" in cpu
    assert options(for_slurm(replace(JOB, gpu="h100")))["gpus-per-node"] == "h100:4"
    assert "--container-image='me/it:1 2'" in for_slurm(replace(JOB, image="me/it:1 2")).replace(
        "'--container-image=me", "--container-image='me"
    )


STEP = """#!/bin/bash
# A step of Slurm: it ends with the codes of $CODES one after the other; `wait` stands for one that ends with 75 when it gets SIGUSR1.
code=$(head -1 codes); tail -n +2 codes > rest; mv rest codes
echo "$@" >> steps
if [ "$code" = wait ]; then
    trap 'exit 75' USR1
    echo > ready
    for _ in $(seq 600); do sleep 0.1; done
fi
exit "$code"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("codes", "end", "steps", "requeued"),
    [
        (["0"], 0, 1, False),
        (["2"], 2, 1, False),
        (["75"], 75, 1, False),  # cancelled, or preempted: not ours to queue
        (["1", "137", "0"], 0, 3, False),
        (["1"] * 5, 1, 4, False),
        (["74", "0"], 0, 2, False),  # a fault of the machine passes
        (["74", "2"], 2, 2, False),
        (["74"] * 5, 74, 4, True),
        (["wait"], 75, 1, True),
        (["137", "wait"], 75, 2, True),
    ],
)
def test_what_the_batch_script_does_when_its_step_ends(codes: list[str], end: int, steps: int, requeued: bool, tmp_path: Path) -> None:
    for name, text in {"srun": STEP, "scontrol": '#!/bin/bash\necho "$@" > requeued\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "codes").write_text("\n".join(codes) + "\n")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"}
    script = subprocess.Popen(["bash"], cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert script.stdin is not None
        script.stdin.write(for_slurm(JOB).replace("sleep 60", "sleep 0.1"))
        script.stdin.close()
        if "wait" in codes:
            while not (tmp_path / "ready").exists() and script.poll() is None:
                pass
            script.send_signal(10)
        assert script.wait(timeout=60) == end
    finally:
        script.kill()
        script.wait()
        if script.stderr is not None:
            script.stderr.close()
    assert len((tmp_path / "steps").read_text().splitlines()) == steps
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    if codes[0] == "74" and requeued:  # but not for ever
        (tmp_path / "requeued").unlink()
        (tmp_path / "codes").write_text("\n".join(codes) + "\n")
        again = subprocess.run(
            ["bash", "-c", for_slurm(JOB).replace("sleep 60", "sleep 0.1")],
            cwd=tmp_path,
            env=environment | {"SLURM_RESTART_COUNT": "3"},
            capture_output=True,
        )
        assert (again.returncode, (tmp_path / "requeued").exists()) == (74, False)


def test_a_train_job() -> None:
    text = for_kubernetes(replace(JOB, image="me/it"), "task: language\n# ours\n", "disk")
    config, runtime, made = yaml.safe_load_all(text)
    assert (config["kind"], config["metadata"]["name"], config["data"]) == (
        "ConfigMap",
        "words-spec",
        {"spec.yaml": "task: language\n# ours\n"},
    )
    assert (made["apiVersion"], made["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    spec = made["spec"]
    assert spec["runtimeRef"] == {"name": "words", "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime"}
    assert (runtime["kind"], runtime["metadata"]["name"]) == ("TrainingRuntime", "words")
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"], spec["activeDeadlineSeconds"]) == (2, 4, 7200)
    assert spec["trainer"]["resourcesPerNode"] == {"requests": {"cpu": "12"}, "limits": {"nvidia.com/gpu": "4"}}
    shell, dash_c, line = spec["trainer"]["command"]
    assert (shell, dash_c) == ("sh", "-c")
    assert line == "cd /workspace && exec carrywave train /etc/carrywave/spec.yaml train.lr=0.5 --run runs/words --continue"
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    within = replicated["template"]["spec"]
    final, uncounted = within["podFailurePolicy"]["rules"]  # a mistake is final; 74 and deaths are tried again; an eviction is no failure
    assert final == {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]}}
    assert uncounted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert within["backoffLimit"] == 6
    pod = within["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a policy for failed pods needs that
    assert (pod["terminationGracePeriodSeconds"], pod["containers"][0]["image"]) == (120, "me/it")
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]} == {"workspace", "spec"}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}


def test_a_train_job_on_cpus_without_a_spec_file() -> None:
    _, made = yaml.safe_load_all(for_kubernetes(replace(CPU, image="me/it", spec=None, seconds=None), None, "disk"))
    assert made["spec"]["trainer"]["command"][-1].endswith("--continue --device cpu")
    assert made["spec"]["trainer"]["resourcesPerNode"] == {"requests": {"cpu": "12"}, "limits": {"cpu": "12"}}
    assert "activeDeadlineSeconds" not in made["spec"]


@pytest.mark.parametrize(
    ("change", "claim", "message"),
    [
        ({}, "disk", "needs an image that has carrywave in it; pass --image IMAGE"),
        ({"image": "x"}, None, "needs a place for data and runs; pass --claim NAME"),
        ({"image": "x", "gpu": "a100"}, "disk", "--gpu a100 has no place in a TrainJob"),
    ],
)
def test_what_a_train_job_needs(change: dict[str, Any], claim: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        for_kubernetes(replace(JOB, **change), None, claim)


def test_a_task_for_skypilot() -> None:
    made = yaml.safe_load(for_skypilot(replace(JOB, gpu="H100", image="me/it"), None))
    assert made["resources"]["job_recovery"] == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [74, 137]}  # 2 is final
    assert (made["name"], made["num_nodes"], made["resources"]["accelerators"]) == ("words", 2, "H100:4")
    assert (made["resources"]["image_id"], made["resources"]["cpus"]) == ("docker:me/it", "12+")
    words = shlex.split(made["run"])
    assert words[:5] == ["timeout", "--preserve-status", "--signal=USR1", "--kill-after=120", "7080"]
    assert words[5:8] == ["carrywave", "train", "my words.yaml"]
    cpu = yaml.safe_load(for_skypilot(replace(CPU, seconds=None), "pip install carrywave"))
    assert "accelerators" not in cpu["resources"]
    assert cpu["setup"] == "pip install carrywave"
    assert cpu["run"].endswith("--continue --devices 4 --device cpu")


@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs timeout")
def test_a_task_that_has_used_up_its_time_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "carrywave").write_text("#!/bin/bash\ntrap 'exit 75' USR1\nfor _ in $(seq 100); do sleep 0.1; done\nexit 9\n")
    (tmp_path / "carrywave").chmod(0o755)
    line = yaml.safe_load(for_skypilot(replace(JOB, gpu="H100", image="me/it"), None))["run"].replace(" 7080 ", " 0.3 ")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run(["bash", "-c", line], env=environment).returncode == 0
    (tmp_path / "carrywave").write_text("#!/bin/bash\nexit 9\n")
    assert subprocess.run(["bash", "-c", line], env=environment).returncode == 9


@pytest.mark.parametrize(
    ("change", "setup", "message"),
    [
        ({"image": "x"}, None, r"needs the kind of GPU; pass --gpu NAME \(sky show-gpus lists them\), or --device cpu"),
        ({"gpu": "H100"}, None, "needs carrywave on the nodes; pass --image IMAGE that has it, or --setup"),
    ],
)
def test_what_a_task_for_skypilot_needs(change: dict[str, Any], setup: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        for_skypilot(replace(JOB, **change), setup)
