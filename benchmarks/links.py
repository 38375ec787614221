"""Positions per second of every strategy over a narrow link, beside what the planner predicts.

Two hosts, network namespaces of this computer, are joined by a link whose bandwidth `tc` limits
(tests/faults/hosts.py: it takes root). Each host has one rank on one core. The computer is measured
first (`planning.calibrate`). The prediction gives each rank a node of its own, with the link's
bandwidth. So a row shows how much of the loss of speed the bandwidth explains.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import yaml

from benchmarks.harness import Row, summarize, write_rows
from planning.calibrate import calibrate
from planning.cost import PricedStep
from planning.describe import Layout, machine, model_of
from project.figures.epochs import read_json
from tests.faults.hosts import Hosts
from training.results import read_metrics

ROOT = Path(__file__).resolve().parents[1]
LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 4, 256, 4, 64, 16, 8
TRAINING = (
    f"--model gpt2-mini --n_layer {LAYERS} --n_embd {WIDTH} --n_head {HEADS} --batch_size {BATCH} "
    f"--model_max_length {LENGTH} --num_batches {STEPS} --dropout 0 --keep 0 --benchmark_only "
    "--dataset training/tasks/corpus/english.txt --device cpu"
)
MBITS = (10_000, 200)  # of the link, both ways
EACH = BATCH // 2
LAYOUTS = {
    "ddp": Layout(2, dp=2, micro_batch=EACH, batch_size=BATCH),
    "fsdp --zero 1": Layout(2, dp=2, micro_batch=EACH, batch_size=BATCH, zero=1),
    "fsdp --zero 3": Layout(2, dp=2, micro_batch=EACH, batch_size=BATCH, zero=3),
    "pipeline": Layout(2, pp=2, micro_batch=BATCH // 4, batch_size=BATCH),
    "tensor": Layout(2, tp=2, micro_batch=BATCH, batch_size=BATCH),
}


def train(hosts: Hosts, strategy: str, folder: Path) -> None:
    """A rank on each host; their workdirs are host0 and host1 in the folder."""
    started = []
    for host in range(2):
        torchrun = (
            f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d "
            f"--rdzv-endpoint {hosts.address(0)}:29400 --rdzv-conf is_host={int(host == 0)} "
            f"--local-addr {hosts.address(host)} -m tests.faults.program project/train.py "
            f"{strategy} {TRAINING}"
        ).split()
        words = [*hosts.inside(host), "taskset", "-c", str(host), sys.executable, *torchrun]
        started.append(subprocess.Popen(
            [*words, "--workdir", str(folder / f"host{host}")],
            cwd=ROOT, stdout=subprocess.DEVNULL,
        ))  # fmt: skip
    if any([process.wait() for process in started]):  # noqa: C419 (wait for all)
        raise RuntimeError(f"{strategy}: a host failed")


def run() -> list[Row]:
    """A row per strategy and bandwidth."""
    rows = []
    own = calibrate()
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
        path = Path(folder) / "machine.yaml"
        # A network sends while the core computes, as shared memory cannot.
        apart = own | {"gpus_per_node": 1, "overlap": "gradients"}
        path.write_text(yaml.safe_dump(apart), "utf-8")
        for strategy, layout in LAYOUTS.items():
            for mbits in MBITS:
                for host in range(2):
                    hosts.slow(host, f"tbf rate {mbits}mbit burst 1mb latency 1s")
                work = Path(folder) / f"{strategy}-{mbits}".replace(" ", "")
                train(hosts, strategy, work)
                steps = [line for line in read_metrics(work / "host0") if "loss" in line]
                seconds = [line["seconds"] for line in steps[2:]]
                size = read_json(work / "host0" / "config.json")
                model = model_of(
                    None, layers=LAYERS, hidden=WIDTH, heads=HEADS, vocab=size["vocab_size"],
                    seq=LENGTH,
                )  # fmt: skip
                nodes = machine(str(path), network=str(mbits / 8000))
                expected = PricedStep(model, replace(layout, precision="fp32"), nodes).seconds
                speeds = [BATCH * LENGTH / s for s in seconds]
                ratio = min(expected, median(seconds)) / max(expected, median(seconds))
                said = f"of the prediction, {BATCH * LENGTH / expected:,.0f}"
                row = Row(
                    f"{strategy}, {mbits} Mbit/s", median(speeds), summarize(speeds)[1],
                    "positions/s", ratio, said,
                )  # fmt: skip
                rows.append(row)
                print(row.name, f"{row.value:,.0f}", said, file=sys.stderr, flush=True)
    write_rows("links", "Strategies over a narrow link between two hosts", rows)
    return rows
