"""The live report: on this machine only, up to date, and samples computed only when the weights have changed."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _folders import write

from carrywave.errors import UserError
from carrywave.report.live import LiveReport, server_of
from carrywave.report.sample_kinds import Samples


class Served:
    """A served folder, and how often samples were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sampled = folder, 0
        self.report = LiveReport([(folder, "runs/words")], self.sample)
        self.server = server_of(self.report)
        self.port = self.server.server_port

    def sample(self, folder: Path) -> Samples:
        self.sampled += 1
        return Samples(f"sample number {self.sampled}")

    def get(self, path: str = "/", host: str | None = None) -> tuple[int, str]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        line.request("GET", path, headers={} if host is None else {"Host": host})
        answer = line.getresponse()
        text = answer.read().decode()
        line.close()
        return answer.status, text

    def wait(self, text: str) -> None:
        """Until the page says it, as a person would."""
        ends = time.monotonic() + 60
        while text not in self.get()[1]:
            assert time.monotonic() < ends
            time.sleep(0.01)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(write(tmp_path / "run"))
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def test_the_page_follows_the_run(served: Served) -> None:
    code, before = served.get()
    assert code == 200
    assert "Samples are being computed." in before
    served.wait("sample number 1")
    stamp = served.get("/stamp")[1]
    assert served.get("/stamp")[1] == stamp
    with (served.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"split": "valid", "epoch": 2, "step": 120, "loss": 1.5}) + "\n")
    assert served.get("/stamp")[1] != stamp
    after = served.get()[1]
    assert "best: 1.5 at step 120" in after
    assert served.sampled == 1  # the weights are the same
    (served.folder / "weights.safetensors").write_bytes(b"new")
    served.wait("sample number 2")


def test_a_fault_in_the_samples_is_said_on_the_page(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> Samples:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(served.report, "sampler", broken)
    served.wait("No samples: RuntimeError: out of memory")


def test_the_script_is_the_only_one_that_may_run(served: Served) -> None:
    page = served.get()[1]
    nonce = page.partition("script-src 'nonce-")[2].partition("'")[0]
    assert nonce
    assert page.count("<script") == 1
    assert f'<script nonce="{nonce}">' in page
    assert nonce not in served.get()[1]


def test_only_this_machine_is_answered(served: Served) -> None:
    assert served.server.server_address[0] == "127.0.0.1"
    assert served.get(host="evil.example")[0] == 403
    assert served.get(host=f"localhost:{served.port}")[0] == 200
    assert served.get("/../../etc/passwd")[0] == 404
    (served.folder / "spec.yaml").unlink()
    code, text = served.get()
    assert code == 404
    assert "is not a run" in text
    with pytest.raises(UserError, match=f"port {served.port} cannot be used: .*; use another --port"):
        server_of(LiveReport([(served.folder, "")], None), served.port)
