"""Predicts a step of parallel training, and searches the best layout, before any GPU is rented.

predict    seconds, tokens/s, where the time goes, memory of every GPU, whether it fits
search     every legal layout: the best, why its neighbours lose, what would change the choice
check      a table of measured runs beside the prediction, with the errors
simulate   one schedule, from the seconds of its actions: bubble, gaps and what they wait for
calibrate  measures this computer, in under a minute, and writes it as a machine

python project/plan.py search --model gpt2-xl --gpus 16 --machine a100-80gb --batch_size 512
python project/plan.py predict --help          explains the options of a command

The model, its constants and how wrong it is: docs/planning.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.schedule import Action
from planning import describe, search
from planning.cost import Prediction, PricedStep, predict
from planning.cost import simulator as prepared
from planning.describe import (
    COLUMNS,
    MACHINES,
    PRESETS,
    REQUIRED,
    SPELLINGS,
    Layout,
    Machine,
    Model,
    measured_in,
    model_of,
    row_of,
    word_in,
)
from planning.simulate import Simulator, Timed, Work, with_times
from project.command_line import Parser, count
from training.launch.errors import refuse

WIDTH = 30  # characters of a whole bar
KNOWN = sorted(file.stem for file in MACHINES.glob("*.yaml"))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="plan.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, description=text, help=text)
        made.add_argument(
            "--json", action="store_true", help="print JSON: its keys are in docs/planning.md"
        )
        return made

    for made in (
        command("predict", "Predict the seconds and the memory of a step."),
        command("search", "Find the fastest layout that fits."),
    ):
        sizes = made.add_argument_group(
            "the model: a preset, or its sizes, or a preset with others"
        )
        sizes.add_argument("--model", metavar="PRESET", help=", ".join(PRESETS))
        for names, text in (
            (("--n_layer", "--layers"), "blocks"),
            (("--n_embd", "--hidden"), "width"),
            (("--n_head", "--heads"), "attention heads"),
            (("--kv_heads",), "heads of keys and values; default: as many as heads"),
            (("--ffn",), "width of the MLP; default: 4 times the model's"),
            (("--vocab_size", "--vocab"), "tokens of the vocabulary"),
            (("--seq", "--model_max_length"), "tokens per sequence"),
        ):
            sizes.add_argument(*names, type=count, help=text)
        sizes.add_argument(
            "--gated_mlp",
            action="store_true",
            help="the MLP has a gate, as in Llama: three matrices, not two",
        )
        sizes.add_argument("--untied", action="store_true", help="the head has weights of its own")
        where = made.add_argument_group("the machine")
        where.add_argument(
            "--machine",
            default="a100-80gb",
            help=f"a YAML file, or {', '.join(KNOWN)} [%(default)s]",
        )
        where.add_argument("--network", help=f"GB/s of a node, or {', '.join(describe.NETWORKS)}")
        where.add_argument(
            "--link", help=f"GB/s of a GPU in its node, or {', '.join(describe.LINKS)}"
        )
        where.add_argument(
            "--gpus", type=count, help="default: dp x pp x tp in predict, one node in search"
        )
        given = made.add_argument_group(
            "the layout; search takes what is given, and tries the rest"
        )
        given.add_argument(
            "--batch_size", type=count, required=True, help="sequences per step, over all GPUs"
        )
        given.add_argument("--dp", type=count, help="replicas")
        given.add_argument("--pp", type=count, help="stages of layers")
        given.add_argument("--tp", type=count, help="parts of every matrix")
        given.add_argument("--micro_batch", type=count, help="sequences per micro-batch")
        given.add_argument("--schedule", choices=[n for n in SCHEDULES if n != "sequential"],
                           help="order of a pipeline's work; 1f1b in predict")  # fmt: skip
        given.add_argument("--chunks", type=count, help="stages per rank, of interleaved")
        given.add_argument("--zero", type=int, choices=(0, 1, 2, 3),
                           help="divided over replicas: 1 optimizer state, 2 + gradients, "
                                "3 + parameters; 0 in predict")  # fmt: skip
        given.add_argument("--sequence_parallel", action="store_true", default=None,
                           help="split the positions, too, outside the cut matrices")  # fmt: skip
        given.add_argument("--recompute", choices=("never", "selective", "always"),
                           help="activations in backward; selective: of attention only; "
                                "never in predict")  # fmt: skip
        given.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16",
                           help="[%(default)s]")  # fmt: skip
        if made.prog.endswith("predict"):
            given.add_argument("--order", choices=("dp-pp-tp", "pp-dp-tp"), default="dp-pp-tp",
                               help="of the ranks, outermost first [%(default)s]")  # fmt: skip
        else:
            made.add_argument("--top", type=count, default=5, help="layouts to show; default: 5")
    made = command("check", "Compare a table of measured runs with their predictions.")
    made.add_argument(
        "table",
        type=Path,
        help=f"CSV with the columns {', '.join(REQUIRED)} (or model and global_batch), and any of "
        f"{', '.join(name for name in COLUMNS if name not in REQUIRED)}; # begins a comment",
    )
    made.add_argument("--machine", required=True, help=f"a YAML file, or {', '.join(KNOWN)}")
    made.add_argument("--network", help="as of predict")
    made.add_argument("--link", help="as of predict")
    made = command(
        "simulate",
        "Time a schedule. Times are in any unit: one number, or one per rank, as 10,10,12.",
    )
    made.add_argument("--stages", type=count, required=True, help="ranks of the pipeline")
    made.add_argument(
        "--num_microbatches", type=count, required=True, help="micro-batches per step"
    )
    made.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="[%(default)s]")
    made.add_argument(
        "--chunks",
        type=count,
        help="stages per rank, of interleaved; each takes its part of a rank's seconds",
    )
    for name, text in (
        ("forward", "F, of one micro-batch"),
        ("backward_input", "I, the half of backward that others wait for"),
        ("backward_weight", "W, the other half"), ("recompute", "the forward before a backward"),
        ("exchange", "of gradients, at the end"), ("update", "of parameters, after it"),
    ):  # fmt: skip
        made.add_argument(
            f"--{name}",
            default="0" if name in ("recompute", "exchange", "update") else "1",
            help=f"{text} [%(default)s]",
        )
    made.add_argument(
        "--transfer", type=float, default=0.0, help="a message between neighbours [0]"
    )
    made.add_argument("--no_overlap", action="store_true", help="messages hold up their sender")
    made.add_argument(
        "--exchange_after",
        action="store_true",
        help="the exchange waits for the last backward to end",
    )
    made.add_argument(
        "--activations", default="1", help="what one micro-batch holds on a rank, in any unit [1]"
    )
    made.add_argument(
        "--early_gradients", action="store_true", help="send gradients before W, as our programs do"
    )
    made.add_argument("--timeline", action="store_true", help="with --json: every action, too")
    made = command("calibrate", "Measure this computer, a core per rank, in under a minute.")
    made.add_argument(
        "--output", type=Path, default=Path("machine.yaml"), help="default: machine.yaml"
    )
    return parser


def model_and_machine(args: argparse.Namespace) -> tuple[Model, Machine]:
    """Raises ValueError."""
    model = model_of(
        args.model, layers=args.n_layer, hidden=args.n_embd, heads=args.n_head,
        kv_heads=args.kv_heads, ffn=args.ffn, vocab=args.vocab_size, seq=args.seq,
        gated_mlp=args.gated_mlp or None, tied=False if args.untied else None,
    )  # fmt: skip
    return model, describe.machine(args.machine, args.network, args.link)


def as_json(found: Prediction) -> dict[str, Any]:
    """The keys that docs/planning.md describes."""
    return {
        "seconds_per_step": found.seconds, "tokens_per_second": found.tokens_per_second,
        "tflops_per_gpu": found.tflops, "bubble": found.bubble, "seconds": found.parts,
        "memory_gb": found.memory_gb, "memory_limit_gb": found.machine.memory_gb,
        "fits": found.fits, "memory_of_stages": [m._asdict() for m in found.memory],
        "blocks_of_stages": found.blocks, "layout": asdict(found.layout),
        "num_microbatches": found.layout.num_microbatches,
    }  # fmt: skip


def say_prediction(found: Prediction) -> None:
    """Prints it."""
    layout, model, limit = found.layout, found.model, found.machine.memory_gb
    print(
        f"{model.parameters / 1e6:,.0f} million parameters, {layout.gpus} x {found.machine.name}: "
        f"{search.options(layout)}, {layout.num_microbatches} micro-batches\n\n"
        f"{found.seconds:.4g} s per step   {found.tokens_per_second:,.0f} tokens/s   "
        f"{found.tflops:.1f} TFLOP/s per GPU   bubble {found.bubble:.1%}\n\nWhere the time goes"
    )
    for name, seconds in sorted(found.parts.items(), key=lambda item: -item[1]):
        if seconds > 0.0005 * found.seconds:
            share = seconds / found.seconds
            print(f"  {name:12} {'#' * round(WIDTH * share):{WIDTH}} {share:6.1%} {seconds:9.4g} s")
    kinds = found.memory[0]._fields
    print(
        "\nMemory of a GPU, GiB\n  stage "
        + "".join(f"{kind:>12}" for kind in kinds)
        + "         sum"
    )
    for r, memory in enumerate(found.memory):
        cells = "".join(f"{value / 2**30:12.2f}" for value in memory)
        print(f"  {r:5} {cells}{memory.gib:12.2f}")
    room = limit - found.memory_gb
    if found.fits:
        print(f"\nIt fits: {room:.1f} of {limit:.1f} GiB are left.")
    else:
        print(
            f"\nIt does not fit: it needs {found.memory_gb:.1f} GiB, and {found.usable_gb:.1f} of "
            f"{limit:.1f} GiB can be used."
        )
    if model.heads % layout.tp:
        print(
            f"Note: {model.heads} heads over {layout.tp} ranks are uneven; train.py refuses that."
        )


def run_predict(args: argparse.Namespace) -> None:
    """`predict`."""
    model, machine = model_and_machine(args)
    pp, tp = args.pp or 1, args.tp or 1
    gpus = args.gpus or (args.dp or 1) * pp * tp
    layout = Layout(
        gpus, args.dp or max(1, gpus // (pp * tp)), tp, pp, args.micro_batch or 1, args.batch_size,
        args.schedule or "1f1b", args.chunks, args.zero or 0, bool(args.sequence_parallel),
        args.recompute or "never", args.precision, args.order,
    )  # fmt: skip
    found = predict(model, layout, machine)
    print(json.dumps(as_json(found), indent=1)) if args.json else say_prediction(found)


def run_search(args: argparse.Namespace) -> None:
    """`search`."""
    model, machine = model_and_machine(args)
    gpus = args.gpus or machine.gpus_per_node
    fixed = {name: getattr(args, name) for name in search.NAMES}
    best, near = search.search(model, gpus, machine, args.batch_size, args.top, **fixed)
    first = best[0]
    reasons = [
        (change, other, search.why(first, other)) for change, other in search.neighbours(first)
    ]
    command = search.command(model, first.layout, machine, args.model)
    changes = list(search.what_if(first, near))
    if args.json:
        print(json.dumps({
            "best": [as_json(found) for found in best],
            "neighbours": [{"change": c, "why": w} | as_json(o) for c, o, w in reasons],
            "what_if": changes, "command": command,
        }, indent=1))  # fmt: skip
        return
    print(f"{'seconds':>9} {'tokens/s':>11} {'GiB':>6} {'bubble':>7}  layout")
    for found in best:
        print(f"{found.seconds:9.4g} {found.tokens_per_second:11,.0f} {found.memory_gb:6.1f} "
              f"{found.bubble:7.1%}  {search.options(found.layout)}")  # fmt: skip
    print("\nOne choice changed:")
    for change, _, reason in reasons:
        print(f"  {change}: {reason}")
    print("\nWhat would change the choice:", *changes, "", command, sep="\n  ")


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table. Raises ValueError."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it is not UTF-8; a table is a CSV file of text") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    rows = list(csv.DictReader(line for line in lines if line.strip() and not line.startswith("#")))
    if not rows:
        raise ValueError(f"{path}: it has no rows")
    given = {name: SPELLINGS.get(name, name) for name in (key.strip() for key in rows[0] if key)}
    for name in set(given.values()) - set(COLUMNS):
        if near := get_close_matches(name, COLUMNS, 1, 0.8):
            raise ValueError(f"{path}: the column {name} is unknown; did you mean {near[0]}?")
    needed = REQUIRED[4:] if "model" in given.values() else REQUIRED
    if missing := [name for name in needed if name not in given.values()]:
        raise ValueError(
            f"{path}: the column {missing[0]} is missing; a table has {', '.join(COLUMNS)}"
        )
    return [
        {SPELLINGS.get(key.strip(), key.strip()): cell or "" for key, cell in row.items() if key}
        for row in rows
    ]


def compared(table: Sequence[dict[str, str]], machine: Machine) -> list[dict[str, Any]]:
    """Each row of a table with its prediction. Raises ValueError, naming the row."""
    found = []
    for k, row in enumerate(table, 1):
        try:
            model, layout, nodes = row_of(row, machine)
            step = PricedStep(model, layout, nodes, legal=False).predict(explain=False)
            measured = {n: measured_in(row, n) for n in ("seconds_per_step", "memory_gb")}
            said = word_in(row, "fits")
            if "oom" in (said, word_in(row, "seconds_per_step"), word_in(row, "memory_gb")):
                said = "0"
            if said not in ("", "0", "1"):
                raise ValueError(f"fits is {said!r}, and must be 1, 0, or empty")
            fits = said == "1" if said else None
        except ValueError as error:
            raise ValueError(f"row {k}: {error}") from None
        found.append(
            {name: row.get(name, "") for name in COLUMNS} | measured | {
                "fits": fits, "predicted_seconds": step.seconds,
                "predicted_memory_gb": step.memory_gb, "predicted_fits": step.fits,
            }
        )  # fmt: skip
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The errors of a table: of time and memory, mean and worst; the share of pairs of layouts of
    the same model, GPUs and batch whose order is right; regret, the seconds that the layout
    predicted to be the fastest takes more than the fastest; the share of rows that fit or not as
    predicted."""
    found: dict[str, float] = {"rows": len(rows)}
    for name, ours in (
        ("seconds_per_step", "predicted_seconds"),
        ("memory_gb", "predicted_memory_gb"),
    ):
        errors = [abs(row[ours] / row[name] - 1) for row in rows if row[name]]
        if errors:
            what = "time" if name == "seconds_per_step" else "memory"
            found |= {f"{what}_error": fmean(errors), f"{what}_worst": max(errors)}
    groups: defaultdict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["seconds_per_step"]:
            key = tuple(
                row[n]
                for n in (
                    "layers",
                    "hidden",
                    "heads",
                    "ffn",
                    "vocab",
                    "seq",
                    "gpus",
                    "global_batch",
                )
            )
            groups[key].append((row["seconds_per_step"], row["predicted_seconds"]))
    pairs = [(a, b) for group in groups.values() for a, b in combinations(group, 2) if a[0] != b[0]]
    if pairs:
        found["pairs_in_order"] = fmean((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
        regrets = [
            min(group, key=lambda g: g[1])[0] / min(group)[0] - 1
            for group in groups.values()
            if len(group) > 1
        ]
        found |= {"regret": fmean(regrets), "regret_worst": max(regrets)}
    known = [row for row in rows if row["fits"] is not None]
    if known:
        found["fits_right"] = fmean(row["fits"] == row["predicted_fits"] for row in known)
    return found


def run_check(args: argparse.Namespace) -> None:
    """`check`."""
    machine = describe.machine(args.machine, args.network, args.link)
    rows = compared(read_table(args.table), machine)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for name, value in summary(rows).items():
        print(f"{name:16} {value:8.0f}" if name == "rows" else f"{name:16} {value:8.1%}")
    timed = [row for row in rows if row["seconds_per_step"]]
    print("\nThe worst rows:\n measured predicted  ratio   GiB predicted  layout")
    off = sorted(timed, key=lambda r: -abs(r["predicted_seconds"] / r["seconds_per_step"] - 1))
    for row in off[:5]:
        ratio, memory = row["predicted_seconds"] / row["seconds_per_step"], row["memory_gb"]
        layout = " ".join(
            f"{n} {row[n]}"
            for n in ("layers", "hidden", "dp", "tp", "pp", "micro_batch", "zero", "global_batch")
            if row[n]
        )
        print(f"{row['seconds_per_step']:9.4g} {row['predicted_seconds']:9.4g} {ratio:6.2f} "
              f"{memory or '-':>5} {row['predicted_memory_gb']:9.1f}  {layout}")  # fmt: skip


def per_stage(text: str, name: str, n: int, parts: int = 1) -> list[float]:
    """The values of n ranks, each dealt to its `parts` stages. Raises ValueError."""
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} {text}: numbers, as 10 or 10,12") from None
    if len(values) not in (1, n) or not all(0 <= value < math.inf for value in values):
        raise ValueError(
            f"--{name} {text}: one finite number, 0 or more, or {n}, one for each of --stages {n}"
        )
    return [value / parts for value in (values * n if len(values) == 1 else values)]


def run_simulate(args: argparse.Namespace) -> None:
    """`simulate`."""
    n = args.stages
    size = n, args.num_microbatches
    simulator = prepared(args.schedule, *size, args.chunks)
    if args.early_gradients:
        simulator = Simulator(find(args.schedule, args.chunks)(*size))
    ranks = simulator.ranks
    parts = len(ranks) // n
    forward, early, late, again, held, exchange = (
        [per_stage(getattr(args, name), name, n, parts)[r] for r in ranks]
        for name in (
            "forward", "backward_input", "backward_weight", "recompute", "activations", "exchange"
        )
    )  # fmt: skip
    update = per_stage(args.update, "update", n)
    if not 0 <= args.transfer < math.inf:
        raise ValueError(f"--transfer {args.transfer:g}: it must be a finite number, 0 or more")
    if not sum(forward) + sum(early) + sum(late):
        raise ValueError(
            "--forward 0 --backward_input 0 --backward_weight 0: something must take time"
        )
    found = simulator.run(Work(
        with_times(forward, early, late), lambda _: args.transfer, not args.no_overlap,
        again.__getitem__, exchange.__getitem__, not args.exchange_after, update.__getitem__,
    ))  # fmt: skip
    gaps, path = found.gaps(), found.critical_path()
    idle: defaultdict[str, float] = defaultdict(float)
    for gap in gaps:
        for cause, part in gap.causes.items():
            idle[cause] += part / n
    peaks = [max(size for _, size in row) for row in found.memory(held.__getitem__)]
    kinds: defaultdict[str, float] = defaultdict(float)
    for timed in path:
        kinds[timed.action.kind.value] += timed.end - timed.start
    if args.json:
        result: dict[str, Any] = {
            "seconds": found.seconds, "span": found.span, "bubble": found.bubble,
            "bubble_over_work": found.bubble_over_work, "busy": found.busy, "idle": dict(idle),
            "peak_activations": peaks, "critical_path": [_event(t) for t in path],
            "gaps": [
                {"rank": g.rank, "start": g.start, "end": g.end, "causes": g.causes,
                 "before": _named(g.before), "waits_for": _named(g.waits_for)}
                for g in gaps
            ],
        }  # fmt: skip
        if args.timeline:
            result["timeline"] = [[_event(timed) for timed in row] for row in found.rows]
        print(json.dumps(result))
        return
    print(
        f"{args.schedule}, {n} ranks, {args.num_microbatches} micro-batches\n\n"
        f"step                {found.seconds:10.6g}\n"
        f"bubble              {found.bubble:10.2%}   idle share of the step\n"
        f"bubble over work    {found.bubble_over_work:10.2%}   idle seconds by those of work\n"
        f"held at most        {', '.join(f'{peak:g}' for peak in peaks)}   per rank\n\n"
        "Idle seconds of a rank, on average"
    )
    for cause, seconds in idle.items():
        print(f"  {cause:12} {seconds:10.6g}")
    print(
        f"\nThe critical path: {len(path)} actions, "
        + ", ".join(f"{k} {v:.6g}" for k, v in kinds.items())
    )
    print("\nThe longest gaps")
    for gap in sorted(gaps, key=lambda g: g.start - g.end)[:5]:
        after = f"before {_named(gap.before)}" if gap.before else "at the end"
        waits = f", waits for {_named(gap.waits_for)}" if gap.waits_for else ""
        print(
            f"  rank {gap.rank}, from {gap.start:.6g} to {gap.end:.6g}: {after}{waits}: {gap.cause}"
        )


def _named(action: Action | None) -> str | None:
    return f"{action} of stage {action.stage}" if action else None


def _event(timed: Timed) -> list[Any]:
    return [timed.action.kind.value, *timed.action[1:], timed.start, timed.end]


def run_calibrate(args: argparse.Namespace) -> None:
    """`calibrate`."""
    from planning.calibrate import calibrate  # torch takes seconds to import

    found = calibrate()
    args.output.write_text(yaml.safe_dump(found, sort_keys=False), "utf-8")
    print(json.dumps(found) if args.json else f"{args.output}:\n{args.output.read_text('utf-8')}")


def parse_plan(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command and its options; ends the program on a mistake."""
    return _parser().parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """The program."""
    args = parse_plan(argv)
    try:
        globals()[f"run_{args.command}"](args)
    except (ValueError, OSError) as error:
        refuse(f"plan.py: error: {error}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a message
    main()
