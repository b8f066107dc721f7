"""In the place of `carrywave train`: writes the metrics of a run whose loss depends on its keys, and obeys SIGTERM as a run does."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

words = sys.argv[1:]
keys = dict(word.split("=", 1) for word in words if "=" in word)
folder = Path(words[words.index("--run") + 1])
stopped = False


def stop(number: int, frame: object) -> None:
    global stopped
    stopped = True


signal.signal(signal.SIGTERM, stop)
rate, hidden = float(json.loads(keys.get("train.lr", "0.1"))), int(keys.get("model.hidden", "4"))
seed = int(keys.get("train.seed", "0"))
if hidden == 13 or rate > 5:
    print("carrywave: this brings bad luck; use another", file=sys.stderr)
    sys.exit(2)
if hidden == 14:
    sys.exit(signal.raise_signal(signal.SIGKILL))
folder.mkdir(exist_ok=True)
if hidden in (26, 27) and not (folder / "again").exists():  # a full disk; somebody who stops this run alone
    (folder / "again").touch()
    sys.exit(74 if hidden == 26 else 75)
if hidden in (28, 29) and not (folder / "again").exists():  # somebody stops this run before its first step
    (folder / "again").touch()
    sys.exit(128 + (signal.SIGHUP if hidden == 28 else signal.SIGUSR1))
if "--init" in words:
    (folder / "init").write_text(words[words.index("--init") + 1])
path = folder / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.is_file() else 0
with path.open("a") as file:
    for epoch in range(done + 1, 5):
        if "fake.killed" in keys:
            signal.raise_signal(signal.SIGKILL)
        if hidden == 15 and not (folder / "again").exists():  # waits to be stopped
            (folder / "again").touch()
            while not stopped:
                time.sleep(0.01)
        if stopped:
            sys.exit(75)
        loss = (rate - 0.01) ** 2 * 1e4 + 1.0 / (epoch * hidden) + seed
        file.write(json.dumps({"split": "valid", "epoch": epoch, "step": epoch * 10, "loss": loss, "accuracy": 1 / (1 + loss)}) + "\n")
        file.flush()
