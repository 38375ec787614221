"""Keeping experts equally busy, by a loss or by biases: how well it works, and what it costs.

    python -m benchmarks.balance --seeds 0 1 2 --steps 120

Trains a small GPT-2 with eight experts on the built-in pairs, once per way and seed. On the
validation data, at target tokens, it counts how often the busiest expert of a layer is chosen, over
the mean of all experts: 1 is even, 4 is the most for two of eight. Each run has its row as soon as
it is done. No pair is used twice, so a run is one epoch.

`python -m benchmarks` does not run it: it measures no times, and trains eighteen models.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness import use_cores
from project.train import lay_out, parse_train, task_of
from training.launch.world import World, quiet_libraries
from training.layouts.layout import LaidOutModel
from training.rank import run_rank, trained
from training.results import read_metrics
from training.resume import Resume
from training.tasks.experts import RoutedFeedForward

WAYS = {
    "nothing": "--balance_coefficient 0",
    "loss, 0.01": "",
    "bias, 0.001": "--balance_by bias",
    "bias, 0.01": "--balance_by bias --balance_rate 0.01",
    "bias, 0.01, 1 shared": "--balance_by bias --balance_rate 0.01 --shared_experts 1 --top_k 1",
    "loss, z 0.001": "--router_z 0.001",
}
MODEL = (
    "single --device cpu --model gpt2-mini --n_layer 2 --n_embd 128 --n_head 4 --experts 8 "
    "--batch_size 32 --learning_rate 4e-3 --lr_scheduler cosine --warmup_steps 20 --n_test 20 "
    "--max_grad_norm 1 --dropout 0.1 --n_validation 200 --keep 0 --timeline 0"
)


def busiest(model: LaidOutModel) -> float:
    """How often the busiest expert is chosen, over the mean of all experts; mean over layers."""
    counts: dict[Any, Any] = defaultdict(int)

    def note(layer: RoutedFeedForward, given: Any, _: object) -> None:
        (x,) = given
        _, choice = layer.mlp(layer.ln_2(x.hidden))
        chosen = choice.experts[x.targets.flatten() != 0].flatten()
        counts[layer] = counts[layer] + torch.bincount(chosen, minlength=layer.mlp.num_experts)

    layers = [m for net in model.modules for m in net.modules() if isinstance(m, RoutedFeedForward)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    _, batches = model.task.validation_batches(0, 1, model.evaluated_microbatches)
    with model.evaluating():
        for x, target in batches:
            model.measure(x, target)
    for hook in hooks:
        hook.remove()
    return mean(float(c.max() / c.double().mean()) for c in counts.values())


def result_of(options: str) -> tuple[float, float, float]:
    """The validation loss, the busiest expert and BLEU of a run."""
    found: list[float] = []

    def work(model: LaidOutModel, resume: Resume) -> None:
        trained(model, resume)
        found.append(busiest(model))

    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        args = parse_train(f"{options} --workdir {folder}".split())
        run_rank(World(), args, task_of, lay_out, work)
        last = read_metrics(Path(folder))[-1]
    return last["validation_loss"], found[0], last["bleu"]


def main() -> None:
    """Prints a row per way and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    quiet_libraries()
    use_cores([0])  # two threads would wait for each other longer than they compute
    print(f"{'':22} seed    loss  busiest    BLEU")
    for way, options in WAYS.items():
        for seed in given.seeds:
            size = f"--n_train {32 * given.steps} --num_batches {given.steps}"
            loss, busy, bleu = result_of(f"{MODEL} {options} {size} --seed {seed}")
            print(f"{way:22} {seed:4}  {loss:6.3f}   {busy:6.3f}  {bleu:6.2f}", flush=True)


if __name__ == "__main__":
    main()
