"""Text larger than memory: how long a run takes to start, what a rank holds, and whether it is as
fast as with a small text. The text is made up: pairs of 240 bytes, of 5,000 words whose frequencies
are like those of a natural language.

    python -m benchmarks data                              200,000 pairs, 48 MB
    python -m benchmarks.data --pairs 10000000             2.4 GB

A start is a process of its own. It reads the text, makes the tokenizer and the tokens, or finds
those of an earlier start, and then picks and pads one rank's batches, without a model.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, alternate, ratio_of, summarize, write_rows
from project.train import parse_train
from training.launch.world import World
from training.tasks.texts import load_texts
from training.tasks.tokens import encode, write_tokens
from training.tasks.translation import TranslationTask

POOL, WORDS, SMALL = 20_000, 5_000, 20_000  # sentences, words; pairs of the small text
AT_START, OF_RANK = 10.0, 400.0  # goals: seconds, MB
STEPS = 20_000  # at most, over which memory is watched
TOGETHER = 4096  # texts that `tokenizers` alone gets at a time: with 512 it was a tenth slower


def make_text(path: Path, pairs: int) -> None:
    """Writes pairs of sentences of about 17 words."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(WORDS)]
    weights = [1 / (i + 3) for i in range(WORDS)]
    pool = [" ".join(rng.choices(words, weights, k=rng.randint(4, 30))) for _ in range(POOL)]
    with path.open("w") as file:
        for number in range(pairs):
            source, target = rng.choice(pool), rng.choice(pool)
            file.write(f'{{"de": "{source} {number}", "en": "{target} {number}"}}\n')


def resident() -> float:
    """MB of this process in memory, with what it has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def start(path: Path, workdir: Path) -> tuple[TranslationTask, float]:
    """The task of one process, and the seconds until it has its examples."""
    began = time.perf_counter()
    args = parse_train(
        f"single --device cpu --model gpt2-mini --dataset {path} --workdir {workdir} "
        "--n_validation 1000 --n_test 100 --batch_size 64".split(),
    )  # fmt: skip
    task = TranslationTask(args, World(), load_texts(args, World()))
    return task, time.perf_counter() - began


def one_start(path: Path, workdir: Path, steps: int) -> dict[str, float]:
    """Seconds of a start; MB above those before it, after a tenth of the steps and after all;
    positions per second of the batches of rank 0 of 2."""
    before = resident()
    task, seconds = start(path, workdir)
    whole = min(steps, task.steps_per_epoch)
    held, positions, began = [resident() - before], 0, time.perf_counter()
    for number, step in enumerate(islice(task.steps(0, 0, 2, None), whole), 1):
        positions += step.positions
        if number in (max(1, whole // 10), whole):
            held.append(resident() - before)
    speed = positions / (time.perf_counter() - began)
    return {"start": seconds, "early": held[1], "late": held[-1], "speed": speed, "steps": whole}


def in_a_process(*args: Any) -> dict[str, float]:
    """`one_start` in a new process."""
    command = [sys.executable, "-m", "benchmarks.data", "--start", *map(str, args)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def tokenizing(path: Path, workdir: Path, folder: Path) -> Row:
    """Texts per second into a file, beside `tokenizers` on the same texts in memory."""
    task, _ = start(path, workdir)
    most = 10 * TOGETHER
    pairs = list(islice(task.texts.pairs("train"), most))
    backend = task.tokenizer.backend_tokenizer

    def ours() -> None:
        folder.mkdir()
        write_tokens(folder / "train", encode(pairs, task.tokenizer, "de", "en"), "uint16")
        shutil.rmtree(folder)

    def theirs() -> None:
        for at in range(0, len(pairs), TOGETHER):
            for key in ("de", "en"):
                backend.encode_batch_fast([pair[key] for pair in pairs[at : at + TOGETHER]])

    seconds = alternate({"ours": ours, "theirs": theirs}, rounds=5)
    middle, quartiles = summarize([2 * len(pairs) / s for s in seconds["ours"]])
    ratio = ratio_of(seconds["theirs"], seconds["ours"])
    return Row(
        "tokenizing into a file", middle, quartiles, "texts/s", ratio, "tokenizers alone", 0.9
    )


def run(pairs: int = 200_000, folder: str | None = None) -> list[Row]:
    """Starts twice with each text and prints the table."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        make_text(place / "small.jsonl", SMALL)
        make_text(place / "text.jsonl", pairs)
        size = (place / "text.jsonl").stat().st_size / 1e6
        first = in_a_process(place / "text.jsonl", place / "big", 2)
        again = in_a_process(place / "text.jsonl", place / "big", STEPS)
        in_a_process(place / "small.jsonl", place / "small", 2)
        small = in_a_process(place / "small.jsonl", place / "small", STEPS)
        tokens = tokenizing(place / "text.jsonl", place / "big", place / "tokens")

    def row(name: str, value: float, unit: str, *of: Any) -> Row:
        return Row(name, value, (value, value), unit, *of)

    held, early, speed, steps = (again[name] for name in ("late", "early", "speed", "steps"))
    rows = [
        row("first start", first["start"], "s"),
        row("second start", again["start"], "s", AT_START / again["start"], "of the goal", 1.0),
        row(f"a rank after {steps:,.0f} steps", held, "MB", OF_RANK / held, "of the goal", 1.0),
        row("the same after a tenth", early, "MB", early / held, "of that", 0.9),
        row("batches", speed, "positions/s", speed / small["speed"], "those of a small text", 0.9),
        tokens,
    ]
    write_rows("data", f"{pairs:,} pairs of made-up text, {size:,.0f} MB", rows)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--folder", help="for the text and its tokens; default: a temporary one")
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        text, workdir, steps = options.start
        print(json.dumps(one_start(Path(text), Path(workdir), int(steps))))
    else:
        run(options.pairs, options.folder)
