"""Predicts a step of parallel training, and searches for the best layout, before any GPU is rented.

predict    seconds, tokens/s, where the time goes, memory of every GPU, whether it fits
search     every legal layout: the best, why the others are slower, the command that trains
simulate   one schedule, from the seconds of its actions: bubble, idle time by cause, memory held
schedule   an order of actions better than the named schedules: docs/schedules.md

python project/plan.py search --model gpt2-xl --gpus 16 --machine a100-80gb --batch_size 512
python project/plan.py search --model gpt2-mini --batch_size 64 --machine this
python project/plan.py predict --help          explains the options of a command

The cost model, its constants and its errors: docs/planning.md.
"""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import project  # noqa: F401  (first: it says what to type if the environment is not active)

# isort: split
from pipeline.schedules.catalogue import SCHEDULES, find, sizes_of
from pipeline.schedules.printed import peak_alive
from pipeline.schedules.written import write_schedule
from planning import order, search
from planning.cost import PricedStep
from planning.describe import (
    LINKS,
    MODELS,
    NETWORKS,
    TRAIN_NAMES,
    Layout,
    Machine,
    Model,
    choices,
    layout_of,
    machine,
    machines,
    model_of,
)
from planning.order import RankTimes
from planning.simulate import Simulator
from project.command_line import Parser, helps_of
from training.launch.errors import UserError, counted, parameters, refuse, say
from training.launch.signals import ENDING_SIGNALS, end_process, set_handlers
from training.options import Options, count, flag, number_type, spelt

BAR = 30  # characters of a whole bar
OF_MODEL = ("model", "n_layer", "n_embd", "n_head", "vgg_width")  # options that say what is trained
SECONDS = {  # of simulate, one number or one for each rank: defaults and meanings
    "forward": (1.0, "F, of one micro-batch"),
    "backward_input": (1.0, "I, the half of backward that other ranks wait for"),
    "backward_weight": (1.0, "W, the other half"),
    "transfer": (0.0, "a message to a neighbour, listed at the rank that sends it"),
}

numbers = number_type(  # between commas
    lambda text: [float(value) for value in text.split(",")],
    lambda values: all(0 <= value < math.inf for value in values), "a finite number, 0 or more",
)  # fmt: skip


def add_fields(group: argparse._ArgumentGroup, kind: type) -> None:
    """Adds the documented fields of a model or a layout as options, also by train.py's names."""
    hints = get_type_hints(kind, include_extras=True)
    for name, meaning in helps_of(kind).items():
        names = dict.fromkeys([TRAIN_NAMES.get(name, name), name])
        settings: dict[str, Any] = {"type": count, "metavar": "N"}
        if hints[name] is bool:  # --tied false
            settings = {"type": flag, "nargs": "?", "const": True}
        if words := choices(hints[name]):
            settings = {"choices": words, "type": type(words[0])}
        group.add_argument(
            *(f"--{each}" for each in names), dest=name, help=meaning,
            required=name == "batch_size", **settings,
        )  # fmt: skip


def parse_plan(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command and its options; ends the program on a mistake."""
    parser = Parser(prog="plan.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, text in (
        ("predict", run_predict, "Predict the seconds and the memory of a step."),
        ("search", run_search, "Find the layout to take. The options that you give stay fixed."),
    ):
        made = commands.add_parser(name, description=text, help=text)
        sizes = made.add_argument_group("model")
        text = "a preset, whose sizes the next options change; or give all sizes"
        sizes.add_argument("--model", choices=tuple(MODELS), help=text)
        add_fields(sizes, Model)
        add_fields(made.add_argument_group("layout"), Layout)
        option = made.add_argument_group("machine").add_argument
        option("--machine", default="a100-80gb", help=f"{', '.join(machines())}, a YAML file, "
               "or this, which measures this computer in a minute; default: a100-80gb")  # fmt: skip
        option("--network", help=f"GB/s of a node, or {', '.join(NETWORKS)}")
        option("--link", help=f"GB/s of a GPU in its node, or {', '.join(LINKS)}")
        made.set_defaults(precision="bf16", run=run)
        if name == "search":
            made.add_argument("--top", type=count, default=5, help="layouts to show; default: 5")
    text = "Time a schedule. Times are in any unit: one number, or one per rank, e.g. 10,10,12."
    made = commands.add_parser("simulate", description=text, help=text)
    made.set_defaults(run=run_simulate)
    option = made.add_argument
    option("--schedule", default="1f1b",
           help=f"{', '.join(SCHEDULES)}, or a file; default: %(default)s")  # fmt: skip
    option("--chunks", type=count, help="stages per rank, if interleaved; they share a rank's time")
    add_sizes_and_times(made)
    text = "Search for a fast order of a pipeline's actions, given times and memory, and write it."
    made = commands.add_parser("schedule", description=text, help=text)
    made.set_defaults(run=run_schedule)
    option = made.add_argument
    option("--memory", type=float, metavar="C",
           help="micro-batches that a rank holds at most; default: as 1f1b")  # fmt: skip
    option("--times", type=Path, metavar="RUN", help="take the seconds that a run has measured")
    option("-o", "--output", type=Path, metavar="FILE",
           help="default: workdir/schedule_4x8.txt, for 4 ranks and 8 micro-batches")  # fmt: skip
    add_sizes_and_times(made)
    return parser.parse_args(argv)


def add_sizes_and_times(parser: argparse.ArgumentParser) -> None:
    """The options of a pipeline's size, and of the seconds of its actions."""
    option = parser.add_argument
    option("--num_devices", "--stages", type=count, metavar="K",
           help="ranks; each has one stage, or two if the schedule is a V; default: 4")  # fmt: skip
    option("--num_microbatches", type=count, metavar="M", help="per step; default: 8")
    for name, (default, meaning) in SECONDS.items():
        option(f"--{name}", type=numbers, help=f"{meaning}; default: {default:g}")


def machine_named(name: str, network: str | None = None, link: str | None = None) -> Machine:
    """As `planning.describe.machine`; `this` measures this computer, whose GPUs are its cores."""
    if name != "this":
        return machine(name, network, link)
    say("Measuring this computer: a minute\n")
    from benchmarks.calibrate import calibrate  # torch takes seconds to import

    return machine(name, network, link, calibrate())


def model_and_machine(args: argparse.Namespace) -> tuple[Model, Machine]:
    """The model and the machine that the options describe."""
    model = model_of(args.model, **{name: getattr(args, name) for name in get_type_hints(Model)})
    return model, machine_named(args.machine, args.network, args.link)


def run_predict(args: argparse.Namespace) -> None:
    """Predicts a step."""
    model, where = model_and_machine(args)
    layout = layout_of(args.gpus, **{n: getattr(args, n) for n in ("batch_size", *search.NAMES)})
    step, m = PricedStep(model, layout, where), layout.num_microbatches
    print(f"{parameters(model.parameters)} in matrices, {layout.gpus} x {where.name}: "
          f"{search.options(layout)}, {m} micro-batch{'es' * (m != 1)}\n\n"
          f"{step.seconds:.4g} s per step   {step.tokens_per_second:,.0f} tokens/s   "
          f"{step.tflops:.1f} TFLOP/s per GPU   bubble {step.bubble:.1%}\n\n"
          "Where the time goes")  # fmt: skip
    for name, seconds in sorted(step.parts.items(), key=lambda item: -item[1]):
        share = seconds / step.seconds
        if share > 0.0005:
            print(f"  {name:12} {'#' * round(BAR * share):{BAR}} {share:6.1%} {seconds:9.4g} s")
    print("\nMemory of a GPU, GiB\n  rank ",
          *(f"{kind:>12}" for kind in (*step.memory[0]._fields, "sum")))  # fmt: skip
    for r, memory in enumerate(step.memory):
        print(f"  {r:5}", *(f"{size / 2**30:12.2f}" for size in (*memory, sum(memory))))
    verdict = "fits" if step.fits else "does not fit"
    print(f"\nIt {verdict}: it needs {step.memory_gb:.1f} GiB, and {step.usable_gb:.1f} of "
          f"{step.machine.memory_gb:.1f} GiB can be used.")  # fmt: skip
    if model.heads % layout.tp:
        print(f"{layout.tp} ranks cannot share {model.heads} heads evenly: train.py refuses that.")


def run_search(args: argparse.Namespace) -> None:
    """Searches for the layout to take, and for others to compare it with."""
    model, where = model_and_machine(args)
    fixed = {name: getattr(args, name) for name in search.NAMES}
    gpus = args.gpus or where.gpus_per_node
    best = search.search(model, gpus, where, args.batch_size, args.top, **fixed)
    name, nodes = args.model or "a model", best[0].nodes
    print(f"{name}, {parameters(model.parameters)} in matrices, {args.batch_size} sequences "
          f"of {model.seq} tokens a step,\n{gpus} x {where.name} on {nodes} "
          f"{'nodes' if nodes > 1 else 'node'}\n\n"
          f"{'seconds':>8} {'between':>16} {'tokens/s':>11} {'GiB':>6}  layout")  # fmt: skip
    for step in best:
        least, most = search.limits(step)
        between = f"{least:.3g} and {most:.3g}" if where.measured_nodes else "not known"
        print(f"{step.seconds:8.4g} {between:>16} {step.tokens_per_second:11,.0f} "
              f"{step.memory_gb:6.1f}  {search.options(step.layout)}")  # fmt: skip
        if step is not best[0]:
            print(f"{'':46}{search.why(best[0], step)}")
    print(f"\n{search.doubts(best[0])}\n")
    if lacking := search.untrainable(model, best[0].layout):
        print(f"No command trains this: train.py has no {lacking}.")
        return
    print(search.command(model, best[0].layout, where, args.model))
    if nodes > 1:
        print("  (on every host; FIRST_HOST names the same host on all, THIS_HOST the host itself)")


def times_given(args: argparse.Namespace, n: int) -> RankTimes:
    """The seconds that the options give, for n ranks."""
    times = []
    for name, (default, _) in SECONDS.items():
        seconds = getattr(args, name) or [default]
        if len(seconds) not in (1, n):
            raise ValueError(f"--{name}: one number, or {n}, one for each of the ranks")
        times.append(seconds * (n if len(seconds) == 1 else 1))
    if not any(map(any, times[:3])):
        raise ValueError("--forward 0 --backward_input 0 --backward_weight 0: one must be above 0")
    return RankTimes(*times)


def times_measured(folder: Path, n: int) -> tuple[RankTimes, str]:
    """The medians of a run of n ranks, as report.py shows them, and train.py's options for its
    model."""
    from project.figures.compared import compare_step  # matplotlib takes a second to import
    from project.figures.runs import Run

    run = Run(folder)
    times = compare_step(run).rank_times()
    if len(times.forward) != n:
        raise ValueError(f"--times {folder}: its pipeline has {len(times.forward)} ranks, not {n}")
    used = {name: run.summary.get(name, getattr(Options, name)) for name in OF_MODEL}
    chosen = (spelt(name, value) for name, value in used.items() if value != getattr(Options, name))
    return times, " ".join(chosen)


def run_schedule(args: argparse.Namespace) -> None:
    """Searches for a better order than the named schedules."""
    n, m = args.num_devices or 4, args.num_microbatches or 8
    given = [f"--{name}" for name in SECONDS if getattr(args, name)]
    if args.times and given:
        raise ValueError(f"--times {args.times} {given[0]}: the run has measured it; leave one out")
    times, model = times_given(args, n), "--model gpt2-mini"
    if args.times:
        times, model = times_measured(args.times, n)
    memory = min(n, m) if args.memory is None else args.memory
    found = order.search_order(n, m, times, memory)
    less, over = 1 - found.seconds / found.seconds_of_name, found.seconds / found.bound - 1
    print(f"{counted(n, 'rank')}, {m} micro-batch{'es' * (m != 1)}, at most {memory:g} held\n\n"
          f"{'seconds' if args.times else 'time':>23}\n"
          f"{found.name:12} {found.seconds_of_name:10.6g}   the best named schedule\n"
          f"{'found':12} {found.seconds:10.6g}   {less:.1%} less; {over:.1%} above the bound\n"
          f"{'bound':12} {found.bound:10.6g}   no order with these stages takes less")  # fmt: skip
    if less < 1e-6:
        print(f"\nNo better order was found: take --schedule {found.name}")
        return
    output = args.output or Path("workdir") / f"schedule_{n}x{m}.txt"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(write_schedule(found.lists, output.name), "utf-8")
    typed = shlex.join(["--schedule", str(output)])
    print(f"\nIt is in {output}. To run it:\n\npython project/train.py pipeline {model} "
          f"--world_size {n} --num_microbatches {m} {typed}")  # fmt: skip


def run_simulate(args: argparse.Namespace) -> None:
    """Times a schedule. The seconds of a rank are shared by its stages."""
    n, m = sizes_of(args.schedule, args.num_devices, args.num_microbatches)
    simulator = Simulator(find(args.schedule, args.chunks)(n, m))
    chunks = len(simulator.ranks) // n
    step = simulator.run(times_given(args, n).work(simulator.ranks))
    peaks = peak_alive(simulator.schedule, lambda _: 1 / chunks)
    print(f"{args.schedule}, {counted(n, 'rank')}, {m} micro-batch{'es' * (m != 1)}\n\n"
          f"step                {step.seconds:10.6g}\n"
          f"bubble              {step.bubble:10.2%}   idle share of the step\n"
          f"bubble over work    {step.bubble / (1 - step.bubble):10.2%}   idle over working time\n"
          f"held at most        {', '.join(f'{peak:.4g}' for peak in peaks)}   per rank, in "
          "micro-batches")  # fmt: skip
    idle = {cause: t for cause, t in step.idle.items() if t > 1e-9 * step.seconds}  # no rounding
    if idle:
        print("\nIdle time of a rank, on average")
    for cause, time in idle.items():
        print(f"  {cause:12} {time:10.6g}")


def main(argv: Sequence[str] | None = None) -> None:
    """The program."""
    args = parse_plan(argv)
    try:
        args.run(args)
    except (ValueError, OSError, UserError) as error:
        refuse(f"plan.py: error: {error}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a message
    set_handlers(ENDING_SIGNALS, end_process)  # as does Ctrl-C
    main()
