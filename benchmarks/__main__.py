"""Runs every benchmark, prints their tables, and writes JSON under benchmarks/results/.

    python -m benchmarks                      all: each takes up to five minutes on two fast cores
    python -m benchmarks data_parallel        one of them
    python -m benchmarks --list
    BENCHMARK_DATASET=my_folder python -m benchmarks generation     on pairs of your own, de to en

A goal is a ratio that this project set itself. A run that misses a goal says so, and ends with
status 1. On a busy machine that is no failure of the code, but no success either.
"""

from __future__ import annotations

import argparse
import importlib

NAMES = (
    "data_parallel", "pipeline", "tensor", "context", "experts", "programs", "generation",
    "recompute", "optimizer", "plan", "data", "documents", "memory", "host",
)  # fmt: skip


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (all)")
    parser.add_argument("--list", action="store_true", help="names the benchmarks")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f"{unknown[0]} is no benchmark; there are {', '.join(NAMES)}")
    if args.list:
        print("\n".join(NAMES))
        return
    missed = []
    for name in args.names or NAMES:
        rows = importlib.import_module(f"benchmarks.{name}").run()
        missed += [f"{name}: {row.name}" for row in rows if row.reached is False]
    if missed:
        print("Goals missed:", *missed, sep="\n  ")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
