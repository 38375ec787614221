"""Draws every figure, from the result files that runs leave; never from numbers typed in.

    python project/plot.py figures            makes the runs that are missing, then draws them all
    python project/plot.py data_parallel --single workdir_1 --multiple workdir_2
    python project/plot.py pipeline --model_parallel workdir_mp --pipeline_parallel workdir_pp
    python project/plot.py training workdir
    python project/plot.py schedule --schedule 1f1b --num_devices 4 --n_chunk 8
    python project/plot.py timeline workdir_pp
    python project/plot.py split_time ddp=1,ddp=2        and throughput, memory, timeline pipeline=3

A comparison leaves the first epoch of each run out: it pays for what happens once, as memory that
is touched for the first time. Bars are means over the other epochs, error bars their standard
deviation; the hatched bar is the ideal. Each command has a --help of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import project.startup  # noqa: F401 (Ctrl-C ends what takes seconds from here on)

from pipeline.schedule import SCHEDULES, find
from pipeline.schedule import draw as draw_as_text
from project.comparison import (
    THROUGHPUT,
    TIME,
    YLABELS,
    Comparison,
    describe,
    mean_and_std,
    read_epochs,
    read_json,
    read_ranks,
    same_model,
)
from project.figure_runs import FIGURES, RUNS, WORKDIRS, make_runs
from project.figures import BLUE, GREEN, GREY, Bar, Curve, draw_bars, draw_curves, save
from project.options import count, run_program
from project.runs_commands import RUN_FIGURES, add_run_commands, draw_runs, picture_of
from project.timeline import draw_schedule
from training.launch import DEVICES, UserError
from training.record import OPTIONS, PICTURE

OUTPUT = Path("submit_figures")

DATA_PARALLEL_HELP = """\
Draws data_parallel_training_time.png (each rank's time for an epoch) and
data_parallel_throughput.png (tokens per second, padding included, summed over the ranks).
N processes are at best N times as fast. On a CPU, give each process the same cores in both runs:

    python project/run_data_parallel.py --world_size 1 --cores_per_rank 1 --workdir workdir_1
    python project/run_data_parallel.py --world_size 2 --cores_per_rank 1 --workdir workdir_2
    python project/plot.py data_parallel --single workdir_1 --multiple workdir_2
"""
PIPELINE_HELP = """\
Draws pipeline_training_time.png and pipeline_throughput.png. Of K stages that take turns one works
at a time: K*M stage steps for M micro-batches. A pipeline needs M+K-1 clocks for them, so it is at
best K*M/(M+K-1) times as fast.

    python project/run_pipeline.py --model_parallel_mode model_parallel --workdir workdir_mp
    python project/run_pipeline.py --model_parallel_mode pipeline_parallel --workdir workdir_pp
    python project/plot.py pipeline --model_parallel workdir_mp --pipeline_parallel workdir_pp
"""
TRAINING_HELP = """\
Draws the loss per target token on training and validation pairs, and BLEU of the translations of
the test split, after each epoch.

    python project/plot.py training workdir
"""
SCHEDULE_HELP = """\
Prints which stage works on which micro-batch when, F forward and B backward, and draws it. Every
action counts as one clock; how long it really takes is the machine's affair.

    python project/plot.py schedule --schedule 1f1b --num_devices 4 --n_chunk 8
"""
RUNS_HELP = f"""\
Runs that are done are kept in {WORKDIRS}/ and not made again, unless their options changed.
They take about seven minutes on two cores:

""" + "\n".join(f"    {name}  {run.what}" for name, run in RUNS.items())


def plot(
    means: Sequence[float],
    stds: Sequence[float],
    labels: Sequence[str],
    fig_name: str | Path,
    *,
    ylabel: str = YLABELS[TIME],
    title: str = "",
) -> Path:
    """The course's function: a bar per label with its error bar, saved as `fig_name`.

    Raises:
        ValueError: the three differ in length.
    """
    bars = [Bar(label, mean, std) for label, mean, std in zip(labels, means, stds, strict=True)]
    return save(draw_bars(bars, title=title, ylabel=ylabel), Path(fig_name))


def plot_results(
    metrics_data: Mapping[str, Sequence[Mapping[str, float]]],
    metric: str,
    fig_name: str | Path | None = None,
) -> Path:
    """The course's function: a bar per run for one metric, with the spread over its epochs.

    Args:
        metrics_data: per label, the results of the epochs that count, as a run writes them.
        metric: training_time, tokens_per_sec, validation_loss, bleu or another of their keys.
        fig_name: by default submit_figures/{metric}.png.
    """
    summaries = [mean_and_std([epoch[metric] for epoch in run]) for run in metrics_data.values()]
    means, stds = [mean for mean, _ in summaries], [std for _, std in summaries]
    ylabel = YLABELS.get(metric, metric.replace("_", " "))
    return plot(
        means, stds, list(metrics_data), fig_name or OUTPUT / f"{metric}.png", ylabel=ylabel
    )


def plot_data_parallel(single: Path, multiple: Path, output: Path = OUTPUT) -> list[Path]:
    """Draws training time and throughput of one process against several, and returns the paths.

    Raises:
        UserError: result files are missing or do not compare.
    """
    command = "python project/run_data_parallel.py --world_size {} --n_epochs 5 --workdir {}"
    remedy = "make them with: " + command
    one = read_ranks(single, remedy.format(1, single))
    many = read_ranks(multiple, remedy.format(2, multiple))
    n = len(many)
    if len(one) != 1 or n == 1:
        raise UserError(
            f"--single {single} has {len(one)} rank(s), --multiple {multiple} has {n}; needed are "
            f"1 and 2 or more; {remedy.format('N', 'DIR')}"
        )
    comparison = Comparison(
        one, many, ("1 process", f"{n} processes"), f"{n} processes", "one", n,
        subtitle(multiple, many[0]),
    )  # fmt: skip
    same_model(single, multiple, remedy.format("N", "DIR"))
    both = f"{remedy.format(1, single)} and --world_size {n} --workdir {multiple}"
    return _draw_comparison(comparison, both, output, "data_parallel")


def plot_pipeline(
    model_parallel: Path,
    pipeline_parallel: Path,
    output: Path = OUTPUT,
    n_chunk: int | None = None,
    stages: int | None = None,
) -> list[Path]:
    """Draws training time and throughput of the pipeline against one stage at a time.

    With M micro-batches and K stages the ideal speed-up is K*M/(M+K-1): M+K-1 clocks instead of
    K*M. Both numbers are taken from the run's options where they are not given, else 4 and 2.

    Raises:
        UserError: result files are missing or do not compare.
    """
    command = "python project/run_pipeline.py --model_parallel_mode {} --n_epochs 5 --workdir {}"
    modes = {"model_parallel": model_parallel, "pipeline_parallel": pipeline_parallel}
    remedies = [f"make them with: {command.format(mode, run)}" for mode, run in modes.items()]
    runs = [
        [read_epochs(run, "eval_results", remedy, (TIME, THROUGHPUT))]
        for run, remedy in zip(modes.values(), remedies, strict=True)
    ]
    options = read_json(pipeline_parallel / OPTIONS)
    m = n_chunk or options.get("n_chunk") or 4
    k = stages or options.get("num_devices") or 2
    comparison = Comparison(
        runs[0], runs[1], ("model parallel", "pipeline parallel"), "Pipeline",
        "model parallelism", k * m / (m + k - 1),
        f"{k} stages, {m} micro-batches; {subtitle(pipeline_parallel, runs[1][0])}",
    )  # fmt: skip
    same_model(model_parallel, pipeline_parallel, remedies[1])
    return _draw_comparison(comparison, remedies[1], output, "pipeline")


def _draw_comparison(pair: Comparison, remedy: str, output: Path, name: str) -> list[Path]:
    pair.check(remedy)
    if pair.spread() > 0.1:
        print(
            f"Epochs of one run differ by {pair.spread():.0%}: was this computer doing other work?"
        )
    return pair.save(output, name)


def subtitle(workdir: Path, epochs: Sequence[object]) -> str:
    """What was trained, and what the bars are."""
    last = len(epochs) - 1
    spread = f"epochs 1 to {last}, mean and standard deviation" if last > 1 else "epoch 1 alone"
    return "; ".join(filter(None, [describe(workdir), spread]))


def plot_training(workdir: Path, output: Path | None = None) -> Path:
    """Draws loss and BLEU of a run over its epochs; returns the path, workdir/training.png by
    default.

    Raises:
        UserError: there are no result files, or not all.
    """
    remedy = f"make them with: python project/run_data_parallel.py --workdir {workdir}"
    prefix = "eval_results" if any(workdir.glob("eval_results_epoch*.json")) else "rank0_results"
    epochs = read_epochs(workdir, prefix, remedy, ("validation_loss", "bleu"))
    losses = [Curve("validation", [e["validation_loss"] for e in epochs], BLUE)]
    if all("training_loss" in e for e in epochs):
        losses.insert(0, Curve("training", [e["training_loss"] for e in epochs], GREY))
    bleu = [Curve("", [e["bleu"] for e in epochs], GREEN)]
    n, last = len(epochs), epochs[-1]
    fig = draw_curves(
        [("loss (nats per target token)", losses), ("BLEU on the test split", bleu)],
        title=f"BLEU {last['bleu']:.1f}, validation loss {last['validation_loss']:.2f} after "
        f"{n} epoch{'s' if n > 1 else ''}",
        subtitle=describe(workdir),
    )
    return save(fig, output or workdir / PICTURE)


def schedule_picture(name: str, folder: Path = OUTPUT) -> Path:
    """Where the picture of a schedule goes."""
    return folder / f"schedule_{name}.png"


def plot_schedule(
    name: str, num_stages: int, num_microbatches: int, output: Path | None = None
) -> Path:
    """Prints the clock table of a schedule, and draws it."""
    print(draw_as_text(find(name)(num_stages, num_microbatches)))
    return draw_schedule(name, num_stages, num_microbatches, output or schedule_picture(name))


def make_figures(output: Path = OUTPUT, device: str = "cpu", again: bool = False) -> list[Path]:
    """Makes the runs that are missing, or all of them `again`, then draws every figure.

    Raises:
        UserError: a run failed.
    """
    make_runs(device, again)
    paths = []
    for figure in map(parse, FIGURES):
        if figure.figure == "schedule":
            figure.output = schedule_picture(figure.schedule, output)
        elif figure.figure in RUN_FIGURES:
            figure.output = picture_of(figure, output)
        else:
            figure.output = output
        paths += draw(figure)
    return paths


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    help_format = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=help_format)
    commands = parser.add_subparsers(dest="figure", required=True, metavar="COMMAND")

    def command(name: str, summary: str, details: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=summary, description=f"{summary}.\n\n{details}", formatter_class=help_format
        )

    dp = command("data_parallel", "One process against several", DATA_PARALLEL_HELP)
    for run, what in (("single", "of one process"), ("multiple", "of several")):
        dp.add_argument(
            f"--{run}", type=Path, required=True, metavar="DIR", help=f"workdir of the run {what}"
        )

    pp = command("pipeline", "The pipeline against one stage at a time", PIPELINE_HELP)
    for mode in ("model_parallel", "pipeline_parallel"):
        pp.add_argument(
            f"--{mode}", type=Path, required=True, metavar="DIR", help="workdir of this mode's run"
        )
    pp.add_argument("--n_chunk", type=count, metavar="M", help="micro-batches M (the run's, or 4)")
    pp.add_argument("--stages", type=count, metavar="K", help="stages K (the run's, or 2)")

    one = command("training", "Loss and BLEU of a run over its epochs", TRAINING_HELP)
    one.add_argument("workdir", type=Path, metavar="DIR", help="workdir of the run")

    table = command("schedule", "The clock table of a pipeline schedule", SCHEDULE_HELP)
    table.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="which (1f1b)")
    table.add_argument("--num_devices", type=count, default=4, metavar="N", help="stages (4)")
    table.add_argument("--n_chunk", type=count, default=8, metavar="M", help="micro-batches (8)")

    add_run_commands(command, OUTPUT)

    every = command("figures", "Everything: the runs that are missing, and all pictures", RUNS_HELP)
    every.add_argument(
        "--device", choices=DEVICES, default="cpu", help="where the runs train (cpu)"
    )
    every.add_argument("--again", action="store_true", help="make all runs anew")

    for several in (dp, pp, every):
        several.add_argument(
            "--output", type=Path, default=OUTPUT, metavar="DIR",
            help=f"folder of the pictures ({OUTPUT})",
        )  # fmt: skip
    for single, default in ((one, "DIR/training.png"), (table, f"{OUTPUT}/schedule_NAME.png")):
        single.add_argument("--output", type=Path, metavar="FILE", help=f"the picture ({default})")
    return parser.parse_args(argv)


def draw(args: argparse.Namespace) -> list[Path]:
    """Draws what the command line asks for."""
    if args.figure == "data_parallel":
        return plot_data_parallel(args.single, args.multiple, args.output)
    if args.figure == "pipeline":
        return plot_pipeline(
            args.model_parallel, args.pipeline_parallel, args.output, args.n_chunk, args.stages
        )
    if args.figure == "training":
        return [plot_training(args.workdir, args.output)]
    if args.figure == "schedule":
        return [plot_schedule(args.schedule, args.num_devices, args.n_chunk, args.output)]
    if args.figure in RUN_FIGURES:
        return [draw_runs(args)]
    return make_figures(args.output, args.device, args.again)


def main() -> None:
    """The program."""
    for path in draw(parse()):
        print(f"drew {path}")


if __name__ == "__main__":
    run_program(main)
