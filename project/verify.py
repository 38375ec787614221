"""Trains with every strategy and layout there is, and compares each with one plain process.

The plain process is in this file: transformers' GPT-2, the whole batch in one rectangle, all
logits, the mean over the batch's target tokens, AdamW. Of this project it knows the model's sizes
and the data. Every strategy starts from its weights and must have its losses, its gradients at
every step by parameter name, and its weights after the last; where dropout is on, a second run of
the strategy must have the same bits.

    python project/verify.py
    python project/verify.py --list
    python project/verify.py --strategy 'dp2-*' --strategy pipe2-zb-m8 --steps 3

Exit status 0: all agree; 1: one does not, and the line under it says where most.
A new strategy joins in verified.py; how large a difference may be: verification.py.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import count, islice
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import project.startup  # noqa: F401 (Ctrl-C ends what takes seconds from here on)

import torch
import torch.nn.functional as F
from torch import Tensor

from project import golden, options
from project.folders import claim_folder
from project.problems import Pictures, Problem, Sentences
from project.rules import check_alone
from project.trainers import EPS, LEARNING_RATE
from project.trajectory import Trajectory, copies
from project.verification import Row, check_all
from project.verified import STRATEGIES, Strategy
from training.launch import UserError
from training.record import write_json

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def plain(problem: Problem, n_steps: int, dtype: torch.dtype) -> Trajectory:
    """One process, plain PyTorch: what every strategy must equal."""
    torch.manual_seed(1)
    model = problem.model().to(dtype)
    with torch.no_grad():  # also biases, which else begin at 0, and norms, which begin at 1
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    batches = problem.batches()
    found = Trajectory(initial=copies(model.named_parameters()))
    every = (indices for epoch in count() for indices in batches.epoch(epoch))
    for indices in islice(every, n_steps):
        loss = plain_loss(problem, model, indices)
        optimizer.zero_grad()
        loss.backward()
        found.losses.append(loss.item())
        found.gradients.append(copies((name, p.grad) for name, p in model.named_parameters()))
        if problem.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), problem.max_grad_norm)
        optimizer.step()
    found.weights = copies(model.named_parameters())
    return found


def plain_loss(problem: Problem, model: Any, indices: list[int]) -> Tensor:
    """The mean loss of the examples with these numbers."""
    if isinstance(problem, Pictures):
        pictures, classes = problem.examples()
        logits = model(pictures[indices].to(next(model.parameters()).dtype))
        return F.cross_entropy(logits, classes[indices])
    assert isinstance(problem, Sentences)
    batch = [problem.examples()[i] for i in indices]
    ids = torch.zeros(len(batch), max(len(example.ids) for example in batch), dtype=torch.long)
    weights = torch.zeros(ids.shape, dtype=model.dtype)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, example.num_source : len(example.ids)] = 1
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def choose(patterns: list[str]) -> list[Strategy]:
    """The strategies whose names match any of the patterns, in the table's order.

    Raises:
        UserError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(strategy.name, pattern) for strategy in STRATEGIES):
            names = ", ".join(strategy.name for strategy in STRATEGIES)
            raise UserError(f"--strategy {pattern}: there is no such strategy; there are {names}")
    return [s for s in STRATEGIES if any(fnmatchcase(s.name, pattern) for pattern in patterns)]


WIDTH = max(len(strategy.name) for strategy in STRATEGIES)
HEADER = f"{'strategy':{WIDTH}}  steps     loss  gradient   weight  verdict"


def show(row: Row) -> None:
    """Prints a row under HEADER."""
    numbers = f"{row.loss.value:>7.1e}   {row.gradient.value:>7.1e}  {row.weight.value:>7.1e}"
    verdict = "FAILED" if row.failure else "same bits" if row.bound == 0 else "equal"
    print(f"{row.strategy:{WIDTH}}  {row.steps:>5}  {numbers}  {verdict}", flush=True)
    if row.failure:
        print(f"    {row.failure} (at most {row.bound:.0e})", flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, with what is wrong with them said before anything is started."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=options.Help, allow_abbrev=False
    )
    parser.add_argument(
        "--strategy", action="append", metavar="NAME,...",
        help="only these, or those that match a pattern as 'pipe2-*'; may be given again",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float64",
        help="in float64 no wrong factor is as small as rounding",
    )  # fmt: skip
    parser.add_argument("--steps", type=options.count, default=10, help="of training")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu",
        help="cuda: ranks share the GPUs in turn; stages of a pipeline need a GPU each, or run on "
        "the CPU",
    )  # fmt: skip
    parser.add_argument(
        "--write_golden", action="store_true",
        help="instead, write the losses of the programs' first 50 steps to tests/golden/, after a "
        "change that is meant to change them",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args(argv)
    check_alone("verify.py")
    named = args.strategy or ["*"]
    args.chosen = choose([name for names in named for name in names.split(",") if name])
    if args.json is not None and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {args.json.parent}; make it first")
    if args.json is not None:
        claim_folder(args.json.parent, f"--json {args.json}", "--json verify.json")
    return args


def main(argv: list[str] | None = None) -> None:
    """The program."""
    args = parse(argv)
    if args.list:
        print("\n".join(strategy.name for strategy in args.chosen))
        return
    if args.write_golden:
        print("\n".join(f"wrote {path}" for path in golden.write()))
        return
    start, dtype = time.perf_counter(), DTYPES[args.dtype]
    torch.set_num_threads(1)  # in matrices as small as these, threads would wait for each other
    problems = dict.fromkeys(strategy.problem.without_dropout for strategy in args.chosen)
    references = {problem: plain(problem, args.steps, dtype) for problem in problems}
    print(f"Largest relative differences from one plain process, {args.dtype}:\n{HEADER}")
    rows = check_all(args.chosen, references, args.steps, dtype, args.device, show)
    failed = [row.strategy for row in rows if row.failure]
    seconds = time.perf_counter() - start
    print(f"{len(rows) - len(failed)} of {len(rows)} strategies agree, in {seconds:.0f} s")
    if args.json is not None:
        about = {"torch": torch.__version__, "machine": platform.machine(), "dtype": args.dtype}
        write_json(args.json, {**about, "rows": [asdict(row) for row in rows]})
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    options.run_program(main)
