"""Result files as runs leave them, with numbers that are easy to calculate with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.launch.world import World
from training.timeline import Timeline

TOKENS = 4200.0  # real tokens of an epoch
SINGLE = [90.0, 19.0, 21.0]  # seconds of epochs; the first is far off: it must be left out
RANKS = ([70.0, 9.0, 11.0], [60.0, 10.0, 12.0])
Rows = Sequence[Sequence[tuple[str, int, int, float, float]]]

# ddp=1 computes 3 of the 10 seconds of its backward again. ddp=2: 10 seconds from 0 to 10. Rank 0:
# F 3, B 4, exposed 2, optimizer 1. Rank 1: F 2, B 5, exposed 1, idle 1, optimizer 1.
DDP1: Rows = [
    [("F", -1, 0, 0, 6), ("B", -1, 0, 6, 16), ("R", -1, 0, 6, 9), ("optimizer", -1, -1, 16, 20)]
]
DDP2: Rows = [
    [
        ("F", -1, 0, 0, 3), ("B", -1, 0, 3, 7), ("all_reduce", 0, -1, 6, 9),
        ("optimizer", -1, -1, 9, 10),
    ],
    [
        ("F", -1, 0, 1, 3), ("B", -1, 0, 3, 8), ("all_reduce", 0, -1, 7, 8.5),
        ("all_reduce", 1, -1, 7.5, 9), ("optimizer", -1, -1, 9, 10),
    ],
]  # fmt: skip
# Two stages, GPipe, two micro-batches: F takes 1, B takes 2, a transfer 0.5.
PIPELINE: Rows = [
    [
        ("F", 0, 0, 0, 1), ("send", 0, 0, 1, 1.5), ("F", 0, 1, 1, 2), ("B", 0, 0, 5.5, 7.5),
        ("B", 0, 1, 7.5, 9.5),
    ],
    [
        ("receive", 1, 0, 1, 1.5), ("F", 1, 0, 1.5, 2.5), ("F", 1, 1, 2.5, 3.5),
        ("B", 1, 0, 3.5, 5.5), ("B", 1, 1, 5.5, 7.5),
        ("optimizer", 1, -1, 9.5, 10),
    ],
]  # fmt: skip


def write_epochs(
    workdir: Path, prefix: str, times: Sequence[float], tokens: float = TOKENS, **options: Any
) -> Path:
    """Results of a rank, 2 positions per real token; and the options, where there are any."""
    workdir.mkdir(parents=True, exist_ok=True)
    for epoch, seconds in enumerate(times):
        result = {
            "training_loss": 4.0 - epoch, "validation_loss": 4.5 - epoch, "bleu": 10.0 * epoch,
            "training_time": seconds, "tokens_per_sec": 2 * tokens / seconds,
            "real_tokens_per_sec": tokens / seconds,
        }  # fmt: skip
        (workdir / f"{prefix}_epoch{epoch}.json").write_text(json.dumps(result), encoding="utf-8")
    if options:
        (workdir / "options.json").write_text(json.dumps(options), encoding="utf-8")
    return workdir


def write_one_and_two(root: Path) -> tuple[Path, Path]:
    """Results of one process, and of two."""
    for rank, times in enumerate(RANKS):
        write_epochs(root / "dp2", f"rank{rank}_results", times, TOKENS / 2, world_size=2)
    return write_epochs(root / "dp1", "rank0_results", SINGLE, world_size=1), root / "dp2"


def write_run(root: Path, name: str, *steps: Rows, **summary: Any) -> Path:
    """A run of train.py, such as ddp2, with its timelines."""
    folder, workers = root / name, int(name[-1])
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "strategy": name[:-1], "world_size": workers, "model": "vgg16", "schedule": None,
        "num_microbatches": 1, "batch_size": 12, "step_seconds": [60.0, 2.0, 4.0], "cores": 1,
        "peak_rss_bytes": [700_000_000 + r for r in range(workers)],
        "state_bytes": {
            "parameters": [40_000_000] * workers, "gradients": [40_000_000] * workers,
            "optimizer": [80_000_000] * workers,
        },
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps({**content, **summary}))
    (folder / "metrics.jsonl").write_text('{"loss": 2, "tokens_per_sec": 60, "seconds": 2}\n')
    write_timelines(folder, *steps, strategy=name[:-1])
    return folder


def write_timelines(folder: Path, *steps: Rows, **about: Any) -> None:
    """Per rank, what it did in steps 1, 2, ...; step 0 is far off."""
    ranks = len(steps[0]) if steps else 0
    for rank in range(ranks):
        timeline = Timeline(World(rank, ranks), about=about)
        timeline.begin_step()
        timeline("F", 0, 0, -900.0, -500.0)
        for rows in steps:
            timeline.begin_step()
            for event in rows[rank]:
                timeline(*event)
        (folder / f"timeline_rank{rank}.json").write_text(json.dumps(timeline.content()), "utf-8")
