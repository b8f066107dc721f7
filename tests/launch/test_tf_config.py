"""TF_CONFIG as a list of hosts, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carrywave.errors import WorkerError
from carrywave.launch.engines.hosts import Hosts
from carrywave.launch.engines.tf_config import read


def config(task: Any, **cluster: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_the_chief_comes_first() -> None:
    found = read(config({"type": "worker", "index": 1}, worker=["b:1", "c:2"], chief=["a:9"]))
    assert found == Hosts(("a:9", "b:1", "c:2"), ("chief 0", "worker 0", "worker 1"), 2)
    assert found.meeting == ("a", 9)
    assert found.own_host == "c"


def test_an_address_of_ipv6() -> None:
    found = read(config({"type": "worker", "index": 0}, worker=["[fd00::1]:2222", "b:1"]))
    assert found is not None
    assert found.meeting == ("fd00::1", 2222)


@pytest.mark.parametrize(
    "environment", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}, config({"type": "worker", "index": 0}, worker=["a:1"])]
)
def test_one_machine_is_no_cluster(environment: dict[str, str]) -> None:
    assert read(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TF_CONFIG": "{cluster"}, "TF_CONFIG is not JSON"),
        ({"TF_CONFIG": "[" * 100_000}, "TF_CONFIG is not JSON"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG is not a JSON object"),
        ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, "TF_CONFIG has no cluster"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, "TF_CONFIG has no task"),
        (
            config({"type": "worker", "index": 0}, worker=["a:1"], ps=["b:1"]),
            "lists tasks of type ps: carrywave has no parameter servers.*list those hosts as",
        ),
        (config({"type": "ps", "index": 0}, worker=["a:1", "b:1"]), "gives this task the type ps: carrywave has no parameter servers"),
        (
            config({"type": "evaluator", "index": 0}, worker=["a:1", "b:1"]),
            "gives this task the type evaluator: workers evaluate during training",
        ),
        (
            config({"type": "worker", "index": 0}, worker=["a:1"], evaluator=["b:1"]),
            "lists tasks of type evaluator: .*carrywave evaluate RUN",
        ),
        (
            config({"type": "worker", "index": 0}, worker=["a:1"], master=["b:1"]),
            "lists tasks of type master: only chief and worker are supported",
        ),
        (config({"type": "worker", "index": 2}, worker=["a:1", "b:1"]), "task worker 2 is not in the cluster, which has 2 of type worker"),
        (config({"type": "chief", "index": 0}, worker=["a:1", "b:1"]), "task chief 0 is not in the cluster, which has 0 of type chief"),
        (config({"type": "worker", "index": 0}, worker={"0": "a:1"}), "cluster.worker is not a list"),
        (config({"type": "worker", "index": 0}, worker=["a", "b:1"]), "'a' is not host:port"),
        (config({"type": "worker", "index": 0}, worker=["a:0", "b:1"]), "'a:0' is not host:port"),
        (config({"type": "worker", "index": 0}, worker=["a:1", "a:1"]), "gives the same address to two tasks"),
        (config({}, worker=["a:1", "b:1"]), "task None None is not in the cluster"),
    ],
)
def test_what_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(WorkerError, match=message) as raised:
        read(environment)
    assert "\n" not in str(raised.value)
