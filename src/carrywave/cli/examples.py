"""Examples for the help of each command, shown below its options: what a user would type, and what for."""

from __future__ import annotations

from rich.markup import escape

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (
        ("carrywave train", "a small character model, to see that everything works"),
        ("carrywave train words.yaml train.epochs=6 --devices 4 --run runs/words", "a spec with a key changed, on four devices"),
        ("carrywave train --run runs/words --resume train.epochs=40", "continue, here with more epochs than before"),
        ("carrywave train words.yaml --seeds 5 --run runs/five", "five runs side by side, to predict with all of them"),
    ),
    "tune": (
        ("carrywave tune words.yaml model.hidden=64,128,256 train.lr=1e-4..1e-2", "20 trials, one for each GPU at a time"),
        ("carrywave tune words.yaml model.dropout=0..0.6 train.epochs=10 --hours 8 --run runs/search", "for a night, 10 epochs each"),
        ("carrywave tune --run runs/search --resume --trials 60", "continue, here with more trials than before"),
    ),
    "plan": (
        ("carrywave plan words.yaml --devices 4", "the best split over four devices of this machine"),
        ("carrywave plan words.yaml --profile h200 --facts vocabulary=33278", "for GPUs that are elsewhere, without the data"),
        ("carrywave plan words.yaml --cluster cluster.yaml", "for a whole cluster"),
        ("carrywave plan words.yaml --profile h200 --devices 64", "how many of 64 devices pay"),
    ),
    "doctor": (
        ("carrywave doctor", "this machine: versions, devices, disks, links"),
        ("carrywave doctor --devices 4 --json report.json", "with four workers, and a report for programs"),
    ),
    "launch": (
        ("carrywave launch --to slurm words.yaml --nodes 2 --devices 8 -o words.sbatch", "a batch script for two nodes of eight GPUs"),
        ("carrywave launch --to kubernetes words.yaml --image registry.example/carrywave --claim data -o job.yaml", "a TrainJob"),
        ("carrywave launch --to skypilot words.yaml --gpu H100 --devices 8 -o words.sky.yaml", "a task for SkyPilot"),
    ),
    "evaluate": (
        ("carrywave evaluate runs/words", "on the run's own test or validation data"),
        ("carrywave evaluate runs/words --data other.txt --json result.json", "on other data, with the figures in a file"),
        ("carrywave evaluate runs/five/seed-1 runs/five/seed-2 runs/five/seed-3", "several runs as one"),
    ),
    "predict": (
        ('carrywave predict runs/words --prompt "The carry" --tokens 100 --temperature 0.8', "continue a text"),
        ("carrywave predict runs/vowels new.jsonl -o labels.jsonl", "a label for each sequence of a file"),
        ("carrywave predict runs/load recent.csv -o forecast.csv", "forecast what follows"),
        ("carrywave predict runs/five/seed-1 runs/five/seed-2 recent.csv -o forecast.csv", "the mean of what several runs forecast"),
    ),
    "export": (
        ("carrywave export runs/words --to safetensors -o words", "weights under the names of torch.nn.LSTM"),
        ("carrywave export runs/words --to onnx --stateful -o models/words", "for a server: the carry goes in and comes out"),
        ("carrywave export runs/words --to torch", "a program of torch.export"),
        ("carrywave export runs/words --to c", "one C file: the weights and a function for a step"),
    ),
    "backtest": (
        ("carrywave backtest runs/load --data recent.csv", "a trained run, from five origins in a file"),
        ("carrywave backtest load.yaml --origins 12 --stride 24", "train on what is before the first origin, then forecast"),
        ("carrywave backtest load.yaml --retrain --run runs/rolling", "train anew for every origin"),
    ),
    "report": (
        ("carrywave report runs/words", "one page: report.html in the run's folder"),
        ("carrywave report runs/words -o words.html --no-samples", "elsewhere, and without reading the data"),
    ),
    "schema": (
        ("carrywave schema -o spec.schema.json", "for an editor that completes and checks YAML"),
        ("carrywave schema", "print it"),
    ),
}


def epilog(command: str) -> str:
    """The examples of a command as the end of its help."""
    lines = [line for words, purpose in EXAMPLES[command] for line in (f"  {words}", f"      {purpose}")]
    return escape("\n".join(["Examples:", *lines]))
