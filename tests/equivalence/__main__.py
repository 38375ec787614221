"""Trains with every layout there is, and compares each with one plain process.

The plain process is transformers' GPT-2 or a VGG16 in plain PyTorch, the whole batch at once. Every
layout starts from its weights and must have its losses, its gradients at every step by parameter
name, and its weights after the last; where dropout is on, a second run must have the same bits.

    python -m tests.equivalence
    python -m tests.equivalence --list
    python -m tests.equivalence --strategy 'ddp2-*' --strategy threads2-zb-m8 --steps 3

Exit status 0: all agree; 1: one does not, and the line under it says where it differs most.
The rows are in tests/equivalence/table.py; how large a difference may be, in compare.py there.
"""

from __future__ import annotations

import argparse
import time
from fnmatch import fnmatchcase

import torch

from project.command_line import Parser
from project.utils import run_program
from tests.equivalence.compare import Result
from tests.equivalence.run import check_all
from tests.equivalence.table import TABLE, Row
from training.launch.errors import UserError, torchrun_world_size
from training.options import number_type

DTYPES = {"float64": torch.float64, "float32": torch.float32}
STEPS = number_type(int, lambda n: n >= 2, "a whole number, 2 or more")
NAME_WIDTH = max(len(row.name) for row in TABLE)
HEADER = f"{'strategy':{NAME_WIDTH}}  steps     loss  gradient   weight  verdict"


def print_result(result: Result) -> None:
    """Prints a result under HEADER."""
    kinds = (result.loss, result.gradient, result.weight)
    numbers = "   ".join(f"{kind.value:>7.1e}" for kind in kinds)
    verdict = "FAILED" if result.failure else "equal" if result.bound else "same bits"
    print(f"{result.name:{NAME_WIDTH}}  {result.steps:>5}  {numbers}  {verdict}", flush=True)
    if result.failure:
        print(f"    {result.failure} (at most {result.bound:.0e})", flush=True)


def choose(patterns: list[str]) -> list[Row]:
    """The rows whose names match any of the patterns, in the table's order.

    Raises:
        UserError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(row.name, pattern) for row in TABLE):
            raise UserError(f"--strategy {pattern}: no row of --list has such a name")
    return [row for row in TABLE if any(fnmatchcase(row.name, pattern) for pattern in patterns)]


def parse_verify(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; mistakes are reported before anything starts."""
    parser = Parser(prog="tests.equivalence", description=__doc__)
    add = parser.add_argument
    add("--strategy", action="append", metavar="PATTERN", help="only these rows, as 'fsdp2-*'")
    add("--list", action="store_true", help="print the names of the rows")
    add("--dtype", choices=DTYPES, default="float64", help="float64 hides no wrong factor")
    add("--steps", type=STEPS, default=10, metavar="N", help="of training")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="ranks share the GPUs in turn")
    args = parser.parse_args(argv)
    if torchrun_world_size() is not None:
        raise UserError("the comparison starts its own ranks: run it without torchrun")
    patterns = [name for given in args.strategy or ["*"] for name in given.split(",") if name]
    args.chosen = choose(patterns)
    return args


def main(argv: list[str] | None = None) -> None:
    """The program."""
    args, start = parse_verify(argv), time.perf_counter()
    if args.list:
        print("\n".join(row.name for row in args.chosen))
        return
    print(f"Largest relative differences from one plain process, {args.dtype}:\n{HEADER}")
    results = check_all(args.chosen, args.steps, DTYPES[args.dtype], args.device, print_result)
    failed = [result for result in results if result.failure]
    seconds = time.perf_counter() - start
    print(f"{len(results) - len(failed)} of {len(results)} strategies agree, in {seconds:.0f} s")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    run_program(main)
