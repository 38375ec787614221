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
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import yaml

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.schedules.catalogue import SCHEDULES, as_written, find
from pipeline.schedules.printed import peak_alive
from pipeline.schedules.schedule import Action
from planning import search
from planning.cost import PricedStep
from planning.describe import (
    LINKS,
    MODELS,
    NETWORKS,
    Layout,
    Machine,
    Model,
    as_number,
    choices,
    layout_of,
    machine,
    machines,
    model_of,
)
from planning.simulate import Simulation, Simulator, Timed, Work, with_times
from planning.table import (
    COLUMNS,
    LAYOUT,
    REQUIRED,
    SIZES,
    SPELLINGS,
    compared,
    read_table,
    summary,
)
from project.command_line import Parser
from project.parser import helps_of, values_of
from training.launch.errors import refuse
from training.options import count

BAR = 30  # characters of a whole bar

# An option: its names, its type or its choices, and what it means.
Option = tuple[str, Callable[[str], Any] | tuple[Any, ...], str]
MACHINE: tuple[Option, ...] = (
    ("--machine", str,
     f"a YAML file, or {', '.join(machines())}; check needs one, else the default is a100-80gb"),
    ("--network", str, f"GB/s of a node, or {', '.join(NETWORKS)}"),
    ("--link", str, f"GB/s of a GPU in its node, or {', '.join(LINKS)}"),
)  # fmt: skip
PRESET: Option = (
    "--model", tuple(MODELS), "a preset, whose sizes the next options change; or give them all"
)  # fmt: skip
TOP: Option = ("--top", count, "layouts to show; default: 5")
SIMULATE: tuple[Option, ...] = (
    ("--stages", count, "ranks of the pipeline; required"),
    ("--num_microbatches", count, "per step; required"),
    ("--schedule", tuple(SCHEDULES), "default: 1f1b"),
    ("--chunks", count, "stages per rank, of interleaved; each takes its part of the seconds"),
    ("--forward", str, "F, of one micro-batch; default: 1"),
    ("--backward_input", str, "I, the half of backward that others wait for; default: 1"),
    ("--backward_weight", str, "W, the other half; default: 1"),
    ("--recompute", str, "the forward before a backward; default: 0"),
    ("--exchange", str, "of gradients, at the end; default: 0"),
    ("--update", str, "of parameters, after it; default: 0"),
    ("--transfer", float, "a message between neighbours; default: 0"),
    ("--no_overlap", bool, "messages hold up their sender"),
    ("--exchange_after", bool, "the exchange waits for the last backward to end"),
    ("--activations", str, "what one micro-batch holds on a rank, in any unit; default: 1"),
    ("--early_gradients", bool, "send gradients before W, as our programs do"),
    ("--timeline", bool, "with --json: every action, too"),
)  # fmt: skip
PER_STAGE = dict.fromkeys(("forward", "backward_input", "backward_weight", "activations"), "1")
PER_STAGE |= dict.fromkeys(("recompute", "exchange", "update"), "0")


def options_from(kind: type) -> Iterator[Option]:
    """The documented fields of a model or a layout, also by train.py's names."""
    hints = get_type_hints(kind, include_extras=True)
    for name, meaning in helps_of(kind).items():
        names = [other for other, column in SPELLINGS.items() if column == name]
        hint = bool if hints[name] is bool else choices(hints[name]) or count
        yield " ".join(f"--{each}" for each in (*names, name)), hint, meaning


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="plan.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, text: str, needed: Sequence[str] = (), **groups: Sequence[Option]
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, description=text, help=text)
        made.add_argument("--json", action="store_true", help="JSON: docs/planning_details.md")
        for title, options in groups.items():
            group = made.add_argument_group(title)
            for names, kind, meaning in options:
                settings: dict[str, Any] = {"help": meaning, "required": names in needed}
                if isinstance(kind, tuple):
                    settings |= {"choices": kind, "type": type(kind[0])}
                else:
                    settings |= values_of(kind)
                own = names.split()
                group.add_argument(*own, dest=own[-1].removeprefix("--"), **settings)
        return made

    for name, text, own in (
        ("predict", "Predict the seconds and the memory of a step.", ()),
        ("search", "Find the fastest layout that fits. What is given of it is not varied.", (TOP,)),
    ):
        model, layout = (PRESET, *options_from(Model)), (*options_from(Layout), *own)
        made = command(name, text, ["--batch_size"], model=model, layout=layout, machine=MACHINE)
        made.set_defaults(machine="a100-80gb", precision="bf16", top=5)
    text = "Compare measured runs with their predictions."
    made = command("check", text, ["--machine"], machine=MACHINE)
    others = ", ".join(name for name in COLUMNS if name not in REQUIRED)
    made.add_argument(
        "table", type=Path, help=f"CSV with the columns {', '.join(REQUIRED)} (or model and "
        f"global_batch), and any of {others}; # begins a comment",
    )  # fmt: skip
    text = "Time a schedule. Times are in any unit: one number, or one per rank, as 10,10,12."
    made = command("simulate", text, ["--stages", "--num_microbatches"], schedule=SIMULATE)
    made.set_defaults(schedule="1f1b", transfer=0.0, **PER_STAGE)
    made = command("calibrate", "Measure this computer, a core per rank, in under a minute.")
    made.add_argument("--output", type=Path, default="machine.yaml", help="default: machine.yaml")
    return parser


def model_and_machine(args: argparse.Namespace) -> tuple[Model, Machine]:
    """Raises ValueError."""
    model = model_of(args.model, **{name: getattr(args, name) for name in SIZES})
    return model, machine(args.machine, args.network, args.link)


def as_json(found: PricedStep) -> dict[str, Any]:
    """The keys that docs/planning_details.md describes."""
    return {
        "seconds_per_step": found.seconds, "tokens_per_second": found.tokens_per_second,
        "tflops_per_gpu": found.tflops, "bubble": found.bubble, "seconds": found.parts,
        "memory_gb": found.memory_gb, "memory_limit_gb": found.machine.memory_gb,
        "fits": found.fits, "memory_of_stages": [m._asdict() for m in found.memory],
        "blocks_of_stages": found.blocks, "layout": asdict(found.layout),
        "num_microbatches": found.layout.num_microbatches,
    }  # fmt: skip


def say_prediction(found: PricedStep) -> None:
    """Prints it."""
    layout, model = found.layout, found.model
    print(f"{model.parameters / 1e6:,.0f} million parameters, {layout.gpus} x "
          f"{found.machine.name}: {search.options(layout)}, {layout.num_microbatches} micro-batches"
          "\n\n"
          f"{found.seconds:.4g} s per step   {found.tokens_per_second:,.0f} tokens/s   "
          f"{found.tflops:.1f} TFLOP/s per GPU   bubble {found.bubble:.1%}\n\n"
          "Where the time goes")  # fmt: skip
    for name, seconds in sorted(found.parts.items(), key=lambda item: -item[1]):
        share = seconds / found.seconds
        if share > 0.0005:
            print(f"  {name:12} {'#' * round(BAR * share):{BAR}} {share:6.1%} {seconds:9.4g} s")
    print("\nMemory of a GPU, GiB\n  stage",
          *(f"{kind:>12}" for kind in (*found.memory[0]._fields, "sum")))  # fmt: skip
    for r, memory in enumerate(found.memory):
        print(f"  {r:5}", *(f"{size / 2**30:12.2f}" for size in (*memory, sum(memory))))
    verdict = "fits" if found.fits else "does not fit"
    print(f"\nIt {verdict}: it needs {found.memory_gb:.1f} GiB, and {found.usable_gb:.1f} of "
          f"{found.machine.memory_gb:.1f} GiB can be used.")  # fmt: skip
    if model.heads % layout.tp:
        print(f"{model.heads} heads over {layout.tp} ranks are uneven: train.py refuses that.")


def run_predict(args: argparse.Namespace) -> None:
    """`predict`."""
    model, where = model_and_machine(args)
    layout = layout_of(**{name: getattr(args, name) for name in ("batch_size", *LAYOUT)})
    found = PricedStep(model, layout, where)
    print(json.dumps(as_json(found), indent=1)) if args.json else say_prediction(found)


def run_search(args: argparse.Namespace) -> None:
    """`search`."""
    model, where = model_and_machine(args)
    gpus = args.gpus or where.gpus_per_node
    fixed = {name: getattr(args, name) for name in search.NAMES}
    best, near = search.search(model, gpus, where, args.batch_size, args.top, **fixed)
    first = best[0]
    reasons = [(change, o, search.why(first, o)) for change, o in search.neighbours(first)]
    command = search.command(model, first.layout, where, args.model)
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
    print("\nOne choice changed:", *(f"{change}: {why}" for change, _, why in reasons), sep="\n  ")
    print("\nWhat would change the choice:", *changes, "", command, sep="\n  ")
    if command.startswith("torchrun"):
        print("  (on every host; FIRST_HOST is the name of one of them, THIS_HOST its own)")


def run_check(args: argparse.Namespace) -> None:
    """`check`."""
    rows = compared(read_table(args.table), machine(args.machine, args.network, args.link))
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for name, value in summary(rows).items():
        print(f"{name:16} {value:8.0f}" if name == "rows" else f"{name:16} {value:8.1%}")
    if problems := [row["problem"] for row in rows if row["problem"]]:
        title = f"\n{len(problems)} not predicted; the first ones (--json has all):"
        print(title, *problems[:5], sep="\n  ")
    timed = [(row["predicted_seconds"] / row["seconds_per_step"], row)
             for row in rows if row["seconds_per_step"] and not row["problem"]]  # fmt: skip
    head = "\nThe worst rows:\n measured predicted  ratio   GiB predicted  layout"
    print(head if timed else "\nNo row has a time to compare: seconds_per_step.")
    shown = ("layers", "hidden", "dp", "tp", "pp", "micro_batch", "zero", "global_batch")
    for ratio, row in sorted(timed, key=lambda pair: -abs(pair[0] - 1))[:5]:
        print(f"{row['seconds_per_step']:9.4g} {row['predicted_seconds']:9.4g} {ratio:6.2f} "
              f"{row['memory_gb'] or '-':>5} {row['predicted_memory_gb']:9.1f} ",
              *(f"{name} {row[name]}" for name in shown if row[name]))  # fmt: skip


def per_stage(text: str, name: str, n: int, parts: int = 1) -> list[float]:
    """The values of n ranks, each dealt to its `parts` stages. Raises ValueError."""
    values = [as_number(value) for value in text.split(",")]
    if len(values) not in (1, n) or not all(0 <= value < math.inf for value in values):
        raise ValueError(
            f"--{name} {text}: one finite number, 0 or more, or {n}, one for each of --stages {n}"
        )
    return [value / parts for value in (values * n if len(values) == 1 else values)]


def run_simulate(args: argparse.Namespace) -> None:
    """`simulate`."""
    n, m = args.stages, args.num_microbatches
    make = find if args.early_gradients else as_written
    simulator = Simulator(make(args.schedule, args.chunks)(n, m))
    ranks, times = simulator.ranks, dict[str, list[float]]()
    for name in PER_STAGE:
        dealt = per_stage(getattr(args, name), name, n, len(ranks) // n)
        times[name] = [dealt[r] for r in ranks]
    passes = [times[name] for name in ("forward", "backward_input", "backward_weight")]
    if not 0 <= args.transfer < math.inf:
        raise ValueError(f"--transfer {args.transfer:g}: it must be a finite number, 0 or more")
    if args.timeline and not args.json:
        raise ValueError("--timeline: it adds every action to what --json prints; --json works")
    if not sum(map(sum, passes)):
        raise ValueError("--forward 0 --backward_input 0 --backward_weight 0: one must be above 0")
    found = simulator.run(Work(
        with_times(*passes), lambda _: args.transfer, not args.no_overlap,
        times["recompute"].__getitem__, times["exchange"].__getitem__, not args.exchange_after,
        per_stage(args.update, "update", n).__getitem__,
    ))  # fmt: skip
    peaks = peak_alive(simulator.schedule, times["activations"].__getitem__)
    result: dict[str, Any] = {
        "seconds": found.seconds, "span": found.span, "bubble": found.bubble,
        "bubble_over_work": found.bubble_over_work, "busy": found.busy, "idle": found.idle,
        "peak_activations": peaks,
        "critical_path": [_event(timed) for timed in found.critical_path()],
        "gaps": [
            {"rank": gap.rank, "start": gap.start, "end": gap.end, "causes": gap.causes,
             "before": _named(gap.before), "waits_for": _named(gap.waits_for)}
            for gap in found.gaps
        ],
    }  # fmt: skip
    if args.json:
        timeline = {"timeline": [[_event(timed) for timed in row] for row in found.rows]}
        print(json.dumps(result | timeline if args.timeline else result))
        return
    whole = simulator.schedule != find(args.schedule, args.chunks)(n, m)
    how = ", whole backwards; our programs send gradients early: --early_gradients" if whole else ""
    print(f"{args.schedule}, {n} ranks, {m} micro-batches{how}\n")
    say_simulation(found, peaks)


def say_simulation(found: Simulation, peaks: Sequence[float]) -> None:
    """Prints it."""
    print(f"step                {found.seconds:10.6g}\n"
          f"bubble              {found.bubble:10.2%}   idle share of the step\n"
          f"bubble over work    {found.bubble_over_work:10.2%}   idle time by that of work\n"
          f"held at most        {', '.join(f'{p:.4g}' for p in peaks)}   per rank")  # fmt: skip
    print("\nIdle time of a rank, on average")
    for cause, seconds in found.idle.items():
        if seconds > 1e-9 * found.seconds:  # more than rounding
            print(f"  {cause:12} {seconds:10.6g}")
    print("\nThe longest gaps")
    for gap in sorted(found.gaps, key=lambda gap: gap.start - gap.end)[:5]:
        waits = f", waits for {_named(gap.waits_for)}" if gap.waits_for else ""
        print(f"  rank {gap.rank}, from {gap.start:.6g} to {gap.end:.6g}: before "
              f"{_named(gap.before) or 'the end'}{waits}: {gap.cause}")  # fmt: skip


def _named(action: Action | None) -> str | None:
    return f"{action} of stage {action.stage}" if action else None


def _event(timed: Timed) -> list[Any]:
    return [timed.action.kind.value, *timed.action[1:], timed.start, timed.end]


def run_calibrate(args: argparse.Namespace) -> None:
    """`calibrate`."""
    if args.output.is_dir() or not args.output.absolute().parent.is_dir():  # before a minute's work
        raise ValueError(f"--output {args.output}: it must name a file in an existing folder")
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
