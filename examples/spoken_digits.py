"""Log-mel frames of spoken digits, and of several in a row, for task=transcription; with NumPy alone.

    git clone https://github.com/Jakobovski/free-spoken-digit-dataset
    python spoken_digits.py free-spoken-digit-dataset/recordings data
    carrywave train spoken-digits.yaml

A recording is digit_speaker_number.wav, 8 kHz. As the data set's own authors split it, numbers 0 to 4 are the test. Every row is one to
five recordings of one speaker, with silence between them, and `labels` are the digits: {"steps": [[40 numbers], …], "labels": [3, 0, 7]}.
Where a digit begins and ends is not written down; the model has to find out. Frames are 25 ms long and 10 ms apart; a number is the
logarithm of the energy in one of 40 bands of the mel scale.
"""

from __future__ import annotations

import json
import sys
import wave
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RATE, FRAME, HOP, BANDS, BINS = 8000, 200, 80, 40, 256
TEST_NUMBERS = 5  # recordings 0 to 4 of each digit and speaker
ROWS = {"train": 4000, "test": 600}
LONGEST = 5  # digits in a row
SILENCE = (0.05, 0.25)  # seconds before, between and after them

Samples = NDArray[np.float64]


def read(path: Path) -> Samples:
    with wave.open(str(path)) as file:
        if file.getframerate() != RATE or file.getnchannels() != 1 or file.getsampwidth() != 2:
            raise SystemExit(f"{path} is not 16 bit, {RATE} Hz, mono")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float64) / 2**15


def filters() -> Samples:
    """[bins, bands]: triangles that overlap by half, evenly spaced on the mel scale."""
    top = 2595.0 * np.log10(1.0 + RATE / 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0.0, top, BANDS + 2) / 2595.0) - 1.0)
    hertz = np.linspace(0.0, RATE / 2, BINS // 2 + 1)[:, None]
    rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    return np.maximum(0.0, np.minimum(rising, falling))


def log_mel(samples: Samples) -> Samples:
    """[frames, bands]."""
    starts = np.arange(0, max(1, len(samples) - FRAME + 1), HOP)
    padded = np.pad(samples, (0, max(0, FRAME - len(samples))))
    frames = padded[starts[:, None] + np.arange(FRAME)] * np.hanning(FRAME)
    energy = np.abs(np.fft.rfft(frames, BINS)) ** 2
    return np.log(energy @ filters() + 1e-6)


def silence(draw: np.random.Generator) -> Samples:
    return draw.normal(scale=1e-3, size=int(RATE * draw.uniform(*SILENCE)))


def main(recordings: Path, folder: Path) -> None:
    known: dict[str, dict[str, list[tuple[int, Path]]]] = {"train": defaultdict(list), "test": defaultdict(list)}
    for path in sorted(recordings.glob("*.wav")):
        digit, speaker, number = path.stem.split("_")
        known["test" if int(number) < TEST_NUMBERS else "train"][speaker].append((int(digit), path))
    folder.mkdir(parents=True, exist_ok=True)
    for part, speakers in known.items():
        draw = np.random.default_rng(1 if part == "train" else 2)
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(ROWS[part]):
                own = speakers[sorted(speakers)[int(draw.integers(len(speakers)))]]
                said = [own[int(draw.integers(len(own)))] for _ in range(int(draw.integers(1, LONGEST + 1)))]
                pieces = [silence(draw), *(each for _, path in said for each in (read(path), silence(draw)))]
                steps = log_mel(np.concatenate(pieces)).round(1)
                file.write(json.dumps({"steps": steps.tolist(), "labels": [digit for digit, _ in said]}, separators=(",", ":")) + "\n")
        print(f"{part}: {ROWS[part]:,} rows of {sum(map(len, speakers.values())):,} recordings, {len(speakers)} speakers")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
