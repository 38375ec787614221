"""The figures: what is drawn follows from the result files, by numbers worked out here by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from project import figure_runs, plot
from project.comparison import mean_and_std
from project.figure_runs import Run, make_runs
from project.figures import Bar, draw_bars, readable, with_spread
from project.timeline import draw_clock_table
from training.launch import UserError
from training.timeline import Timeline

ROOT = Path(__file__).resolve().parents[2]
# Seconds of epochs 0, 1, 2. Epoch 0 is far off: where it is not left out, every number is wrong.
SINGLE = [90.0, 19.0, 21.0]
RANKS = ([70.0, 9.0, 11.0], [60.0, 10.0, 12.0])
TOKENS = 4200.0  # real tokens of an epoch


def write(workdir: Path, prefix: str, times: list[float], tokens: float = TOKENS) -> Path:
    """Result files as a run leaves them; 2 positions per real token."""
    workdir.mkdir(parents=True, exist_ok=True)
    for epoch, seconds in enumerate(times):
        result = {
            "training_loss": 4.0 - epoch,
            "validation_loss": 4.5 - epoch,
            "bleu": 10.0 * epoch,
            "training_time": seconds,
            "tokens_per_sec": 2 * tokens / seconds,
            "real_tokens_per_sec": tokens / seconds,
        }
        path = workdir / f"{prefix}_epoch{epoch}.json"
        path.write_text(json.dumps(result), encoding="utf-8")
    return workdir


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write(tmp_path / "one", "rank0_results", SINGLE)


@pytest.fixture
def multiple(tmp_path: Path) -> Path:
    for rank, times in enumerate(RANKS):
        write(tmp_path / "two", f"rank{rank}_results", times, TOKENS / 2)
    return tmp_path / "two"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are saved, by the name of their file; they are saved, too."""
    figures: dict[str, Figure] = {}
    savefig = Figure.savefig

    def keep(self: Figure, path: Path, **options: Any) -> None:
        figures[Path(path).name] = self
        savefig(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def bars(ax: Axes) -> list[Rectangle]:
    """The bars of a bar chart, left to right."""
    (container,) = [c for c in ax.containers if isinstance(c, BarContainer)]
    return [bar for bar in container if isinstance(bar, Rectangle)]


def error_bars(ax: Axes) -> list[tuple[float, float]]:
    """Where each error bar begins and ends."""
    segments = [s for lines in ax.collections for s in getattr(lines, "get_segments", list)()]
    return [(float(s[0][1]), float(s[1][1])) for s in segments]


def curves(ax: Axes) -> list[list[float]]:
    return [np.asarray(line.get_ydata()).tolist() for line in ax.lines]


def labels(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_xticklabels()]


def texts(fig: Figure) -> list[str]:
    """All that is written in the picture, but for the axes' labels."""
    written = [text.get_text() for text in fig.texts]
    return written + [text.get_text() for ax in fig.axes for text in ax.texts]


def heights(ax: Axes) -> list[float]:
    return [bar.get_height() for bar in bars(ax)]


def test_plot_draws_a_bar_with_its_error_per_label(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    path = tmp_path / "made" / "times.png"
    plot.plot([3.0, 1.5], [0.25, 0.5], ["Single GPU", "Data Parallel - GPU0"], str(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (ax,) = drawn["times.png"].axes
    assert heights(ax) == [3.0, 1.5]
    assert error_bars(ax) == [(2.75, 3.25), (1.0, 2.0)]
    assert labels(ax) == ["Single GPU", "Data Parallel - GPU0"]
    assert texts(drawn["times.png"])[-2:] == ["3.00 ± 0.25", "1.50 ± 0.50"]


def test_plot_refuses_lists_of_unequal_lengths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        plot.plot([1.0, 2.0], [0.1], ["a", "b"], tmp_path / "x.png")


def test_plot_results_summarises_a_metric_of_each_run(
    tmp_path: Path, drawn: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"a": [{"bleu": 1.0}, {"bleu": 3.0}], "b": [{"bleu": 5.0}]}
    assert plot.plot_results(data, "bleu") == Path("submit_figures/bleu.png")
    (ax,) = drawn["bleu.png"].axes
    assert (labels(ax), heights(ax)) == (["a", "b"], [2.0, 5.0])
    assert error_bars(ax) == [pytest.approx((2 - 2**0.5, 2 + 2**0.5))]  # one value has no spread


def test_mean_and_standard_deviation_are_those_of_a_sample() -> None:
    assert mean_and_std([2.0, 4.0, 9.0]) == pytest.approx((5.0, 13.0**0.5))  # (9 + 1 + 16) / 2
    assert mean_and_std([7.0]) == (7.0, 0.0)


def test_data_parallel_times(
    single: Path, multiple: Path, tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    paths = plot.plot_data_parallel(single, multiple, tmp_path)
    names = ["data_parallel_training_time.png", "data_parallel_throughput.png"]
    assert paths == [tmp_path / name for name in names]
    fig = drawn["data_parallel_training_time.png"]
    (ax,) = fig.axes
    assert labels(ax) == ["1 process", "rank 0", "rank 1", "ideal"]
    assert heights(ax) == [20.0, 10.0, 11.0, 10.0]
    spread = 2**0.5  # of 19 and 21, of 9 and 11, of 10 and 12
    assert error_bars(ax) == [
        pytest.approx((mean - spread, mean + spread)) for mean in (20, 10, 11)
    ]
    written = texts(fig)
    assert written[0] == "2 processes: 1.82x as fast as one (ideal 2x)"  # 20 s to the slowest's 11
    assert [text for text in written[2:] if text.endswith("x")] == ["2.00x", "1.82x", "2x"]
    assert "epochs 1 to 2" in written[1]
    assert [bool(bar.get_hatch()) for bar in bars(ax)] == [False, False, False, True]


def test_data_parallel_throughput(
    single: Path, multiple: Path, tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    plot.plot_data_parallel(single, multiple, tmp_path)
    fig = drawn["data_parallel_throughput.png"]
    (ax,) = fig.axes
    one = (8400 / 19 + 8400 / 21) / 2
    two = (4200 / 9 + 4200 / 10 + 4200 / 11 + 4200 / 12) / 2  # summed over ranks, mean over epochs
    assert labels(ax) == ["1 process", "2 processes", "ideal"]
    assert heights(ax) == pytest.approx([one, two, 2 * one])
    low, high = error_bars(ax)[1]
    assert (high - low) / 2 == pytest.approx((886.6667 - 731.8182) / 2**0.5, rel=1e-4)
    assert texts(fig)[0] == "2 processes: 1.92x the tokens/s of one (ideal 2x)"
    assert ax.get_title(loc="left") == "tokens per second, padding included, all ranks together"


def test_runs_that_were_disturbed_are_pointed_out(
    single: Path, multiple: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot.plot_data_parallel(single, multiple, tmp_path)  # slowest ranks: 10 s and 12 s
    assert capsys.readouterr().out.startswith("Epochs of one run differ by 13%: was this computer")
    write(multiple, "rank1_results", [60.0, 11.0, 12.0], TOKENS / 2)  # 6 %
    plot.plot_data_parallel(single, multiple, tmp_path)
    assert capsys.readouterr().out == ""


def test_many_ranks_share_a_bar(single: Path, tmp_path: Path, drawn: dict[str, Figure]) -> None:
    for rank in range(12):  # rank 10 sorts before rank 2 as text
        write(tmp_path / "12", f"rank{rank}_results", [9.0, 2.0 + rank / 10], TOKENS / 12)
    plot.plot_data_parallel(single, tmp_path / "12", tmp_path)
    (ax,) = drawn["data_parallel_training_time.png"].axes
    assert labels(ax) == ["1 process", "12 processes", "ideal"]
    assert heights(ax) == pytest.approx([20.0, 3.1, 20 / 12])


def test_the_subtitle_tells_the_model_and_the_batch(
    single: Path, multiple: Path, tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    config = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096}
    (multiple / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (multiple / "options.json").write_text(
        json.dumps({"batch_size": 128, "cores": 1, "device": "cpu"}), encoding="utf-8"
    )
    plot.plot_data_parallel(single, multiple, tmp_path)
    assert texts(drawn["data_parallel_throughput.png"])[1].replace("\n", " ") == (
        "GPT-2 with 4 blocks of width 256, vocabulary 4,096; batches of 128 pairs; "
        "1 core per process; epochs 1 to 2, mean and standard deviation"
    )
    config["n_layer"] = 12
    (single / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="same model"):
        plot.plot_data_parallel(single, multiple, tmp_path)


@pytest.mark.parametrize(
    ("given", "ideal", "title"),
    [
        ({}, 1.6, "Pipeline: 1.50x as fast as model parallelism (ideal 1.6x)"),  # 2 * 4 / 5
        (
            {"n_chunk": 6, "stages": 3},
            2.25,  # 3 * 6 / 8
            "Pipeline: 1.50x as fast as model parallelism (ideal 2.25x)",
        ),
    ],
)
def test_pipeline(
    tmp_path: Path, drawn: dict[str, Figure], given: dict[str, int], ideal: float, title: str
) -> None:
    model = write(tmp_path / "mp", "eval_results", [50.0, 36.0, 36.0])
    pipe = write(tmp_path / "pp", "eval_results", [40.0, 23.0, 25.0])
    plot.plot_pipeline(model, pipe, tmp_path, **given)
    fig = drawn["pipeline_training_time.png"]
    (ax,) = fig.axes
    assert labels(ax) == ["model parallel", "pipeline parallel", "ideal"]
    assert heights(ax) == pytest.approx([36.0, 24.0, 36 / ideal])
    assert texts(fig)[0] == title
    (ax,) = drawn["pipeline_throughput.png"].axes
    assert heights(ax) == pytest.approx([8400 / 36, (8400 / 23 + 8400 / 25) / 2, 8400 / 36 * ideal])


def test_training_draws_losses_and_bleu(single: Path, drawn: dict[str, Figure]) -> None:
    assert plot.plot_training(single) == single / "training.png"
    fig = drawn["training.png"]
    loss, bleu = fig.axes
    assert curves(loss) == [[4.0, 3.0, 2.0], [4.5, 3.5, 2.5]]
    assert curves(bleu) == [[0.0, 10.0, 20.0]]
    assert [text.get_text() for text in loss.texts] == ["training\n2.00", "validation\n2.50"]
    assert texts(fig)[0] == "BLEU 20.0, validation loss 2.50 after 3 epochs"


def test_training_of_a_pipeline_run_that_diverged(tmp_path: Path) -> None:
    run = write(tmp_path / "pp", "eval_results", [1.0])
    result = json.loads((run / "eval_results_epoch0.json").read_text(encoding="utf-8"))
    result |= {"validation_loss": None, "training_loss": None, "bleu": 0.0}
    (run / "eval_results_epoch0.json").write_text(json.dumps(result), encoding="utf-8")
    assert plot.plot_training(run, tmp_path / "x.png").exists()


def test_one_epoch_whose_losses_are_close(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """No label runs into the name of its panel."""
    plot.plot_training(write(tmp_path / "short", "eval_results", [1.0]))
    fig = drawn["training.png"]
    fig.draw_without_rendering()
    for ax in fig.axes:
        top = ax.get_window_extent().y1
        assert all(text.get_window_extent().y1 <= top for text in ax.texts)
    assert texts(fig)[0] == "BLEU 0.0, validation loss 4.50 after 1 epoch"


def test_a_schedule_is_printed_and_drawn_from_the_same_table(
    tmp_path: Path, drawn: dict[str, Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--schedule=1f1b", "--num_devices=3", "--n_chunk=4"]
    path = tmp_path / "1f1b.png"
    assert plot.draw(plot.parse(["schedule", *options, f"--output={path}"])) == [path]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "stage 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
        "stage 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .",
        "stage 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .",
    ]
    fig = drawn["1f1b.png"]
    (ax,) = fig.axes
    _, *containers = [c for c in ax.containers if isinstance(c, BarContainer)]
    forward = containers[0][0].get_facecolor()
    cells = [["."] * 12 for _ in range(3)]
    for (box,), number in zip(containers, ax.texts, strict=True):
        kind = "F" if box.get_facecolor() == forward else "B"
        cells[round(box.get_y() + box.get_height() / 2)][round(box.get_x())] = (
            kind + number.get_text()
        )
    assert [line.split()[2:] for line in printed] == cells
    assert texts(fig)[:2] == [
        "1f1b: 3 stages, 4 micro-batches, 12 clocks, 33% idle",
        "a box is a micro-batch; the stages hold the activations of at most 3, 2, 1",
    ]


def write_summary(folder: Path, name: str) -> None:
    """What train.py leaves, of the run of that name in the table; nothing for other programs."""
    if name not in figure_runs.TRAINED:
        return
    options = figure_runs.TRAINED[name].options
    workers = int(options["num_workers"])
    summary = {
        **options, "strategy": name[:-1], "step_seconds": [1.0] * int(options["num_batches"]),
        "peak_rss_bytes": [2] * workers, "state_bytes": [1] * workers,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def test_figures_draws_every_picture_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From runs that are there; their options are those of the table."""
    monkeypatch.chdir(tmp_path)
    for name, run in figure_runs.RUNS.items():
        for prefix in run.results:
            write(figure_runs.WORKDIRS / name, prefix, SINGLE + [19.0] * 2, TOKENS)
        folder = figure_runs.WORKDIRS / name
        folder.mkdir(parents=True, exist_ok=True)
        options = {**run.options, "device": "cpu"}
        (folder / "options.json").write_text(json.dumps(options), encoding="utf-8")
        write_summary(folder, name)
    for rank in range(2):
        write(figure_runs.WORKDIRS / "dp2", f"rank{rank}_results", SINGLE + [19.0] * 2, TOKENS / 2)
    for name in figure_runs.RUNS:
        for rank in range(workers := 2 if name.endswith("2") else 1):
            timeline = Timeline(rank)
            timeline.world_size = workers
            timeline("F", 0, 0, 1.0, 2.0)
            timeline.write(figure_runs.WORKDIRS / name)
    plot.make_figures(tmp_path / "pictures")
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        "data_parallel_throughput.png",
        "data_parallel_training_time.png",
        "memory.png",
        "pipeline_throughput.png",
        "pipeline_training_time.png",
        "schedule_1f1b.png",
        "schedule_gpipe.png",
        "split_time.png",
        "throughput.png",
        "timeline_dp2.png",
        "timeline_fsdp2.png",
        "timeline_pipeline2.png",
        "timeline_pp.png",
    ]


def test_the_pipelines_ideal_is_that_of_the_runs_options(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    model = write(tmp_path / "mp", "eval_results", [50.0, 36.0, 36.0])
    pipe = write(tmp_path / "pp", "eval_results", [40.0, 23.0, 25.0])
    options = {
        "n_chunk": 8, "num_devices": 3, "batch_size": 64, "cores": 2, "device": "cpu",
    }  # fmt: skip
    (pipe / "options.json").write_text(json.dumps(options), encoding="utf-8")
    plot.plot_pipeline(model, pipe, tmp_path)
    title, subtitle = texts(drawn["pipeline_training_time.png"])[:2]
    assert title == "Pipeline: 1.50x as fast as model parallelism (ideal 2.4x)"  # 3 * 8 / 10
    assert subtitle.replace("\n", " ") == (
        "3 stages, 8 micro-batches; batches of 64 pairs; 2 cores; "
        "epochs 1 to 2, mean and standard deviation"
    )


class Kind(str, Enum):
    FORWARD = "F"


def test_clock_table(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    rows = [
        [(Kind.FORWARD, 0, 0, 1), (Kind.FORWARD, 1, 1, 2), ("B", 0, 4, 6)],
        [("F", 0, 1, 2), ("send", 0, 2, 3), ("B", 7, 2, 4)],
    ]
    assert draw_clock_table(rows, tmp_path / "t.png") == tmp_path / "t.png"
    fig = drawn["t.png"]
    (ax,) = fig.axes
    _, *containers = [c for c in ax.containers if isinstance(c, BarContainer)]  # less the rows
    boxes = [(b.get_x(), b.get_x() + b.get_width(), b.get_facecolor()) for (b,) in containers]
    assert [box[:2] for box in boxes] == [(0, 1), (1, 2), (1, 2), (4, 6), (2, 4), (2, 3)]
    assert len({colour for *_, colour in boxes[:3]}) == 1  # forward, all of one colour
    assert len({colour for *_, colour in boxes}) == 3  # and another for backward, and send
    assert [text.get_text() for text in ax.texts] == ["0", "1", "0", "0", "7"]
    legend = ax.get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()] == ["forward", "backward", "send", "idle"]
    assert texts(fig)[0] == "2 stages, 3 micro-batches: 6 clocks, 42% idle"  # 7 of 12 are work
    assert labels(ax) == ["0", "1", "2", "3", "4", "5"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["stage 0", "stage 1"]
    assert ax.yaxis_inverted()


def test_a_measured_timeline_begins_at_0_in_a_handy_unit(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    rows = [[("F", 0, 100.0, 100.010), ("optimizer", 0, 100.030, 100.040)]]
    draw_clock_table(rows, tmp_path / "t.png", unit="s")
    (ax,) = drawn["t.png"].axes
    _, *containers = [c for c in ax.containers if isinstance(c, BarContainer)]
    spans = [(b.get_x(), b.get_width()) for (b,) in containers]
    assert spans == [pytest.approx((0.0, 10.0), abs=1e-6), pytest.approx((30.0, 10.0), abs=1e-6)]
    assert ax.get_xlabel() == "time (ms)"
    assert texts(drawn["t.png"])[0] == "1 stages, 1 micro-batches: 40.0 ms, 50% idle"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"), (0.01234, "0.0123"), (1.0, "1.00"), (22.13, "22.1"), (1234.5, "1,234"),
        (987654.0, "987,654"), (1.5e6, "1.50 M"), (2.5e10, "25.0 G"), (7e-6, "7e-06"),
    ],
)  # fmt: skip
def test_readable(value: float, text: str) -> None:
    assert readable(value) == text


def test_with_spread() -> None:
    assert with_spread(22.13, 0.314) == "22.1 ± 0.31"
    assert with_spread(10183.0, 122.4) == "10,183 ± 122"
    assert with_spread(1.5e6, 3e4) == "1.50 ± 0.030 M"
    assert with_spread(4.0, 0.0) == "4.00"


def test_numbers_in_the_picture_do_not_overlap() -> None:
    """Six bars with long numbers and labels: the most that a comparison draws."""
    fig = draw_bars(
        [Bar(f"rank {i} of some machine", 4e5 + i, 12345.6, inside="3.75x") for i in range(6)],
        ylabel="seconds",
    )
    fig.draw_without_rendering()
    (ax,) = fig.axes
    for things in (ax.texts, ax.get_xticklabels()):
        boxes = [t.get_window_extent() for t in things if "x" not in t.get_text()]
        assert len(boxes) == 6
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


def test_the_longest_title_stays_on_the_page() -> None:
    title = "Pipeline: 1.50x the tokens/s of model parallelism (ideal 2.25x)"
    fig = draw_bars([Bar("a", 1.0)], title=title, subtitle="batches of words " * 20)
    fig.draw_without_rendering()
    page = fig.get_window_extent()
    assert fig.texts[0].get_text() == title
    assert all(text.get_window_extent().x1 < page.x1 for text in fig.texts)


def test_errors_name_the_command_that_helps(single: Path, multiple: Path, tmp_path: Path) -> None:
    def message(one: Path, two: Path) -> str:
        with pytest.raises(UserError) as caught:
            plot.plot_data_parallel(one, two, tmp_path / "figures")
        assert "\n" not in str(caught.value)
        assert "python project/run_data_parallel.py --world_size" in str(caught.value)
        return str(caught.value)

    nothing = tmp_path / "nothing"
    assert "nothing/rank0_results_epoch0.json is not there" in message(nothing, multiple)
    assert f"--world_size 2 --n_epochs 5 --workdir {nothing}" in message(single, nothing)
    assert "2 rank(s)" in message(multiple, multiple)
    other = write(tmp_path / "other", "rank0_results", SINGLE, tokens=2 * TOKENS)
    assert "8,400 tokens per epoch, 2 processes on 4,200" in message(other, multiple)
    short = write(tmp_path / "short", "rank0_results", SINGLE[:1])
    assert "only one epoch" in message(short, multiple)
    (multiple / "rank1_results_epoch2.json").unlink()
    assert "3, 2 epochs" in message(single, multiple)
    (multiple / "rank1_results_epoch0.json").unlink()
    assert "rank1_results_epoch0.json is not there" in message(single, multiple)
    (multiple / "rank1_results_epoch0.json").write_text("{", encoding="utf-8")
    assert "cannot be read" in message(single, multiple)
    (multiple / "rank1_results_epoch0.json").write_text("{}", encoding="utf-8")
    assert "has no training_time" in message(single, multiple)
    assert not (tmp_path / "figures").exists()


def test_the_program_prints_an_error_in_one_line_and_ends_with_2(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "project" / "plot.py", "training", tmp_path / "nothing"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("plot.py: error: ") and run.stderr.count("\n") == 1


PROGRAM = """
import json, sys
from pathlib import Path
options = dict(a[2:].split("=", 1) for a in sys.argv[1:])
folder = Path(options["workdir"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "options.json").write_text(
    json.dumps({k: int(v) if v.isdecimal() else v for k, v in options.items()})
)
with (folder / "calls").open("a") as calls:
    calls.write(options["device"] + options["seed"])
for epoch in range(int(options["n_epochs"])):
    (folder / f"rank0_results_epoch{epoch}.json").write_text(json.dumps({}))
sys.exit(int(options["seed"]) > 8)
"""


def test_runs_are_made_once_and_again_when_their_options_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def make(seed: int, device: str = "cpu", again: bool = False, n_epochs: int = 2) -> str:
        run = Run("a run", str(program), {"n_epochs": n_epochs, "seed": seed}, ("rank0_results",))
        monkeypatch.setattr(figure_runs, "RUNS", {"a": run})
        make_runs(device, again)
        return (tmp_path / "workdir_figures/a/calls").read_text(encoding="utf-8")

    assert make(1) == "cpu1"
    assert make(1) == "cpu1"
    assert make(2) == "cpu1cpu2"
    assert make(2, "cuda") == "cpu1cpu2cuda2"
    assert make(2, "cuda", again=True) == "cpu1cpu2cuda2cuda2"
    (tmp_path / "workdir_figures/a/rank0_results_epoch1.json").unlink()  # not complete
    assert make(2, "cuda") == "cpu1cpu2cuda2cuda2cuda2"
    with pytest.raises(UserError, match=r"status 1 from: python .*--seed=9"):
        make(9)
    with pytest.raises(UserError):  # what a failed run left counts for nothing
        make(9)
