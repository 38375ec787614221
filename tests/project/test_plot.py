"""The figures: what is drawn follows from the result files, by numbers worked out here by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from project import plot
from project.plot_timeline import bubbles, duration, ideal_of, in_step, label_of, shares, steps_of
from tests.project.made_up import (
    DDP1,
    DDP2,
    PIPELINE,
    RANKS,
    SINGLE,
    TOKENS,
    Rows,
    write_epochs,
    write_run,
)
from training.curves import plot_training, readable
from training.errors import UserError
from training.timeline import Event


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_epochs(tmp_path / "one", "rank0_results", SINGLE, world_size=1)


@pytest.fixture
def multiple(tmp_path: Path) -> Path:
    for rank, times in enumerate(RANKS):
        write_epochs(tmp_path / "two", f"rank{rank}_results", times, TOKENS / 2, world_size=2)
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


def boxes(ax: Axes) -> list[Rectangle]:
    """Bars, or their parts, in the order in which they were drawn."""
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def heights(ax: Axes) -> list[float]:
    return [box.get_height() for box in boxes(ax)]


def error_bars(ax: Axes) -> list[tuple[float, float]]:
    """Where each error bar begins and ends."""
    segments = [s for lines in ax.collections for s in getattr(lines, "get_segments", list)()]
    return [(float(s[0][1]), float(s[1][1])) for s in segments]


def labels(ax: Axes) -> list[str]:
    return [label.get_text().replace("\n", " ") for label in ax.get_xticklabels()]


def title(fig: Figure) -> str:
    return fig.get_suptitle().replace("\n", " ")


def foot(fig: Figure) -> str:
    assert fig._supxlabel is not None  # type: ignore[attr-defined]
    return fig._supxlabel.get_text().replace("\n", " ")  # type: ignore[attr-defined]


def inside(ax: Axes) -> list[str]:
    """What is written into bars, and above them."""
    return [text.get_text() for text in ax.texts]


def legend(fig: Figure) -> list[str]:
    box = fig.axes[-1].get_legend()
    assert box is not None
    return [text.get_text() for text in box.get_texts()]


# The course's functions


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
    assert inside(ax) == ["3.00 ± 0.250", "1.50 ± 0.500"]
    with pytest.raises(ValueError, match="zip"):
        plot.plot([1.0, 2.0], [0.1], ["a", "b"], path)


def test_plot_results_summarises_a_metric_of_each_run(
    tmp_path: Path, drawn: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"a": [{"bleu": 1.0}, {"bleu": 3.0}], "b": [{"bleu": 5.0}]}
    assert plot.plot_results(data, "bleu") == Path("submit_figures/bleu.png")
    (ax,) = drawn["bleu.png"].axes
    assert (labels(ax), heights(ax)) == (["a", "b"], [2.0, 5.0])
    assert error_bars(ax) == [pytest.approx((2 - 2**0.5, 2 + 2**0.5))]  # of a sample: / (n - 1)


# Runs of the course's programs


def test_data_parallel(
    single: Path, multiple: Path, tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    names = ["data_parallel_training_time.png", "data_parallel_throughput.png"]
    paths = plot.plot_data_parallel(single, multiple, tmp_path)
    assert paths == [tmp_path / name for name in names]
    time, throughput = (drawn[name] for name in names)
    (ax,) = time.axes
    assert labels(ax) == ["1 process", "rank 0", "rank 1", "ideal"]
    assert heights(ax) == [20.0, 10.0, 11.0, 10.0]
    spread = 2**0.5  # of 19 and 21, of 9 and 11, of 10 and 12
    assert error_bars(ax) == [pytest.approx((m - spread, m + spread)) for m in (20, 10, 11)]
    assert title(time) == "2 processes: 1.82x as fast as one (ideal 2x)"  # 20 s to the slowest's 11
    assert [text for text in inside(ax) if text.endswith("x")] == ["2.00x", "1.82x", "2x"]
    both = (  # per epoch as many tokens
        "mean and standard deviation of all epochs but the first; 1.82x by time, 1.92x by "
        "tokens/s: the time is that of the slowest rank, tokens/s are added over the ranks"
    )
    assert foot(time) == both
    assert [bool(bar.get_hatch()) for bar in boxes(ax)] == [False, False, False, True]

    (ax,) = throughput.axes
    one = (8400 / 19 + 8400 / 21) / 2
    two = (4200 / 9 + 4200 / 10 + 4200 / 11 + 4200 / 12) / 2  # summed over ranks, mean over epochs
    assert labels(ax) == ["1 process", "2 processes", "ideal"]
    assert heights(ax) == pytest.approx([one, two, 2 * one])
    low, high = error_bars(ax)[1]
    assert (high - low) / 2 == pytest.approx((886.6667 - 731.8182) / 2**0.5, rel=1e-4)
    assert title(throughput) == "2 processes: 1.92x the tokens/s of one (ideal 2x)"
    assert foot(throughput) == both


def test_processes_of_unequal_cores_have_no_ideal(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """One process had both cores, two have one each; and less padding."""
    single, multiple = tmp_path / "one", tmp_path / "two"
    write_epochs(single, "rank0_results", SINGLE, 8400, batch_size=64, cores=2)
    for rank, times in enumerate(RANKS):
        options = {"world_size": 2, "batch_size": 128, "cores": 1}
        write_epochs(multiple, f"rank{rank}_results", times, 3780, **options)
    plot.plot_data_parallel(single, multiple, tmp_path)
    time = drawn["data_parallel_training_time.png"]
    two = "batch 128 1 core"
    assert labels(time.axes[0]) == ["1 process batch 64 2 cores", f"rank 0 {two}", f"rank 1 {two}"]
    assert title(time) == "2 processes: 1.82x as fast as one"
    *_, cores, padding = foot(time).split("; ")
    assert cores == (
        "no ideal is drawn, since a process has 2 cores in one run and 1 in the other: "
        "--cores_per_rank 1 for both makes them equal"
    )
    assert padding == (
        "1.82x by time, 1.73x by tokens/s: with 2 processes an epoch has 10% fewer tokens, as "
        "every part of a batch is padded to its own longest sentence"
    )


@pytest.mark.parametrize(
    ("command", "options", "ideal", "about"),
    [
        ("", {}, 1.6, ""),  # 2 * 4 / 5
        (
            "",
            {"num_microbatches": 8, "num_devices": 3, "schedule": "zb", "batch_size": 64,
             "model": "gpt2"},
            2.4,  # 3 * 8 / 10
            "gpt2; batches of 64; 3 stages, zb, 8 micro-batches; ",
        ),
    ],
)  # fmt: skip
def test_pipeline(
    tmp_path: Path,
    drawn: dict[str, Figure],
    command: str,
    options: dict[str, Any],
    ideal: float,
    about: str,
) -> None:
    model = write_epochs(tmp_path / "mp", "eval_results", [50.0, 36.0, 36.0])
    pipe = write_epochs(tmp_path / "pp", "eval_results", [40.0, 23.0, 25.0], **options)
    line = f"pipeline --model_parallel {model} --pipeline_parallel {pipe} {command}"
    plot.draw_figure(plot.parse([*line.split(), "--output", str(tmp_path)]))
    fig = drawn["pipeline_training_time.png"]
    (ax,) = fig.axes
    batch = " batch 64" if options else ""
    assert labels(ax) == ["model parallel", f"pipeline{batch}", "ideal"]
    assert heights(ax) == pytest.approx([36.0, 24.0, 36 / ideal])
    assert title(fig) == f"pipeline: 1.50x as fast as model parallel (ideal {ideal}x)"
    assert foot(fig) == f"{about}mean and standard deviation of all epochs but the first"
    (ax,) = drawn["pipeline_throughput.png"].axes
    assert heights(ax) == pytest.approx([8400 / 36, (8400 / 23 + 8400 / 25) / 2, 8400 / 36 * ideal])


def test_more_than_ideal_is_explained(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """The baseline has the whole batch at once; or its stages hand over slowly: of 10 s no stage
    works in 4."""
    pipe = write_epochs(tmp_path / "pp", "eval_results", [9.0, 4.0, 4.0], num_microbatches=4)
    line = f"pipeline --model_parallel {{}} --pipeline_parallel {pipe} --output {tmp_path}"
    whole = write_epochs(tmp_path / "mp", "eval_results", [9.0, 8.0, 8.0], num_microbatches=1)
    plot.draw_figure(plot.parse(line.format(whole).split()))
    assert foot(drawn["pipeline_throughput.png"]).endswith(
        "; more than ideal, since the baseline works on the whole batch in one piece, and smaller "
        "ones stay in the caches"
    )
    rows: Rows = [[("F", 0, 0, 0, 1), ("B", 0, 0, 7, 10)], [("F", 1, 0, 3, 4), ("B", 1, 0, 4, 5)]]
    slow = write_run(tmp_path, "model2", rows, num_microbatches=4, schedule="sequential")
    write_epochs(slow, "eval_results", [9.0, 8.0, 8.0])
    (slow / "summary.json").write_text('{"num_microbatches": 4, "schedule": "sequential"}')
    plot.draw_figure(plot.parse(line.format(slow).split()))
    assert foot(drawn["pipeline_training_time.png"]).endswith(
        "; more than ideal, since the baseline also loses time between its actions: in 40.0% of a "
        "step no stage works"
    )


def test_training_draws_losses_and_score(single: Path, drawn: dict[str, Figure]) -> None:
    summary = {"batch_size": 128, "cores": 1, "model": "gpt2-mini", "n_layer": 2, "n_embd": None}
    (single / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert plot_training(single, plot.describe(single)) == single / "training.png"
    fig = drawn["training.png"]
    curves = [[np.asarray(line.get_ydata()).tolist() for line in ax.lines] for ax in fig.axes]
    assert curves == [[[4.0, 3.0, 2.0], [4.5, 3.5, 2.5]], [[0.0, 10.0, 20.0]]]
    epochs = [np.asarray(line.get_xdata()).tolist() for ax in fig.axes for line in ax.lines]
    assert epochs == [[1, 2, 3]] * 3
    named = [[line.get_label() for line in ax.lines] for ax in fig.axes]
    assert named == [["training 2.00", "validation 2.50"], ["BLEU 20.0"]]
    assert title(fig) == "BLEU 20.0, validation loss 2.50 after 3 epochs"
    assert foot(fig) == "gpt2-mini, n_layer 2; batches of 128; 1 core per process"
    plot_training(single, "", 5)
    assert title(drawn["training.png"]).endswith(" after 5 steps")


def test_losses_of_runs_are_named_by_what_differs(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    runs = [write_epochs(tmp_path / name, "rank0_results", [1.0] * 2) for name in "ab"]
    for run, precision in zip(runs, ("fp32", "bf16"), strict=True):
        about = {"model": "gpt2-mini", "precision": precision, "workdir": str(run), "dropout": 0.1}
        (run / "summary.json").write_text(json.dumps(about), encoding="utf-8")
    (tmp_path / "b" / "rank0_results_epoch1.json").write_text(
        '{"training_loss": 1.0, "validation_loss": 2.0}'
    )
    args = ["training", *map(str, runs), "--output", str(tmp_path / "losses.png")]
    assert plot.draw_figure(plot.parse(args)) == [tmp_path / "losses.png"]
    found = [
        {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in ax.lines}
        for ax in drawn["losses.png"].axes
    ]
    assert found == [
        {"fp32": [4.0, 3.0], "bf16": [4.0, 1.0]}, {"fp32": [4.5, 3.5], "bf16": [4.5, 2.0]}
    ]  # fmt: skip


def test_training_of_pictures_and_of_runs_without_a_loss(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    path = write_epochs(tmp_path, "eval_results", [1.0]) / "eval_results_epoch0.json"
    path.write_text('{"training_loss": 1, "validation_loss": 2, "accuracy": 50.0}')
    plot_training(tmp_path, "")
    assert title(drawn["training.png"]) == "accuracy 50.0, validation loss 2.00 after 1 epoch"
    path.write_text('{"training_loss": null, "validation_loss": null, "bleu": null}')
    plot_training(tmp_path, "")
    assert len(drawn["training.png"].axes) == 1


def test_a_schedule_is_printed_and_drawn_from_the_same_table(
    tmp_path: Path, drawn: dict[str, Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "1f1b.png"
    line = f"schedule --schedule=1f1b --num_devices=3 --n_chunk=4 --output={path}"
    assert plot.draw_figure(plot.parse(line.split())) == [path]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "stage 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
        "stage 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .",
        "stage 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .",
    ]
    fig = drawn["1f1b.png"]
    (ax,) = fig.axes
    actions = [box for box in boxes(ax) if box.get_width() == 1]  # the others are the rows
    forward = actions[0].get_facecolor()
    cells = [["."] * 12 for _ in range(3)]
    for box, number in zip(actions, inside(ax), strict=True):
        kind = "F" if box.get_facecolor() == forward else "B"
        cells[round(box.get_y() + box.get_height() / 2)][round(box.get_x())] = kind + number
    assert [line.split()[2:] for line in printed] == cells
    assert title(fig) == "1f1b: 3 stages, 4 micro-batches, 12 clocks, 33% idle"
    assert foot(fig).endswith("activations of at most 3, 2, 1 of them")
    assert legend(fig) == ["forward", "backward", "idle"]
    assert labels(ax) == [str(k) for k in range(12)]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]


# Runs of train.py


def picture(root: Path, drawn: dict[str, Figure], *command: str) -> Figure:
    args = plot.parse([*command, "--workdir", str(root), "--output", str(root / "p.png")])
    assert plot.draw_figure(args) == [root / "p.png"]
    return drawn["p.png"]


def test_split_time(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    write_run(tmp_path, "ddp1", DDP1)
    write_run(tmp_path, "ddp2", DDP2)
    fig = picture(tmp_path, drawn, "split_time", "ddp=1,ddp=2")
    (ax,) = fig.axes
    found = [(b.get_x() + b.get_width() / 2, b.get_y(), b.get_height()) for b in boxes(ax)]
    assert found == [
        pytest.approx(box)
        for box in [
            (0, 0, 6), (0, 6, 10), (0, 16, 4),
            (1, 0, 2.5), (1, 2.5, 4.5), (1, 7, 1), (1, 8, 1.5), (1, 9.5, 0.5),
        ]
    ]  # fmt: skip
    assert labels(ax) == ["ddp 1 worker", "ddp 2 workers"]
    assert title(fig) == "ddp, 2 workers: communication 15% of a step, idle 5%"
    shares = ["30%", "50%", "20%", "20.0", "25%", "45%", "15%", "10.0"]  # where there is room
    assert inside(ax) == shares
    assert legend(fig) == ["forward", "backward", "optimizer", "communication", "idle"]


def test_throughput(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """12 examples in 2 and 4 s are 6 and 3 per second; the ideal is relative to the fewest workers
    of a strategy."""
    write_run(tmp_path, "ddp1")
    write_run(tmp_path, "ddp4", step_seconds=[9.0, 1.0, 1.0])
    write_run(tmp_path, "fsdp2", step_seconds=[3.0], cores=2)  # one step is all there is
    fig = picture(tmp_path, drawn, "throughput", "ddp=4,ddp=1,fsdp=2")
    (ax,) = fig.axes
    assert labels(ax) == ["ddp 4 workers", "ideal", "ddp 1 worker", "fsdp 2 workers"]
    assert heights(ax) == [12.0, 18.0, 4.5, 4.0]
    assert error_bars(ax) == [pytest.approx((4.5 - 4.5**0.5, 4.5 + 4.5**0.5))]
    assert title(fig) == "ddp, 4 workers: 2.67x the examples/s of one (ideal 4x)"
    assert foot(fig).startswith("vgg16; batches of 12; mean and")  # what all have in common
    assert len({bar.get_facecolor() for bar in boxes(ax)}) == 3  # baseline, measured, ideal
    assert title(picture(tmp_path, drawn, "throughput", "fsdp=2")) == (
        "fsdp, 2 workers: 4.00 examples per second"
    )


def test_memory(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    write_run(tmp_path, "ddp1")
    state = {"parameters": [40e6, 40e6], "gradients": [40e6, 20e6], "optimizer": [0, 0]}
    write_run(tmp_path, "fsdp2", state_bytes=state)
    fig = picture(tmp_path, drawn, "memory", "ddp=1,fsdp=2")
    (ax,) = fig.axes
    assert heights(ax) == pytest.approx(
        [40, 40, 80, 700, 40, 40, 0, 700, 40, 20, 0, 700.000001]
    )  # fmt: skip
    ranks = ["ddp 1 worker rank 0", "fsdp 2 workers rank 0", "fsdp 2 workers rank 1"]
    assert labels(ax) == [label for rank in ranks for label in (rank, "peak")]
    assert title(fig) == "fsdp, 2 workers: 50% of the state per rank of ddp, 1 worker"
    assert legend(fig) == ["parameters", "gradients", "optimizer", "peak resident"]


def test_timeline(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """Measured: 6 of 9.5 busy on both stages. Ideal: 6 of 9, (n-1)/(m+n-1) = 1/3 idle."""
    write_run(tmp_path, "pipeline2", PIPELINE, schedule="gpipe", num_microbatches=2)
    fig = picture(tmp_path, drawn, "timeline", "pipeline=2")
    measured, ideal = fig.axes
    assert foot(fig).endswith("; numbers: micro-batches")
    assert title(fig) == "pipeline, gpipe, 2 stages: 36.8% idle, ideal 33.3%"
    assert "2 stages, gpipe, 2 micro-batches; 1 core per process; step 1; " in foot(fig)
    assert measured.get_title(loc="left") == (
        "measured: 9.50 s, 37% idle; then the optimizer: 500 ms"
    )
    assert ideal.get_title(loc="left") == "ideal: 9.00 s, 33% idle"
    rows = [label.get_text() for label in measured.get_yticklabels()]
    assert rows == ["rank 0\n37% idle", "rank 1\n37% idle"]
    assert legend(fig) == ["forward", "backward", "optimizer", "send", "receive", "idle"]
    assert inside(ideal) == ["0", "1", "0", "1"] * 2
    spans = [(b.get_x(), b.get_x() + b.get_width()) for b in boxes(ideal)]
    assert spans == [
        pytest.approx(span)
        for span in [
            (0, 9), (0, 1), (1, 2), (5, 7), (7, 9), (0, 9), (1, 2), (2, 3), (3, 5), (5, 7)
        ]
    ]  # fmt: skip
    assert (tmp_path / "pipeline2" / "trace.json").is_file()
    by_folder = picture(tmp_path, drawn, "timeline", str(tmp_path / "pipeline2"))
    assert title(by_folder) == title(fig)
    zero = picture(tmp_path, drawn, "timeline", "pipeline=2", "--step", "0")
    assert "; step 0; " in foot(zero)


def test_a_timeline_without_a_schedule_has_no_ideal(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    write_run(tmp_path, "ddp2", DDP2)
    fig = picture(tmp_path, drawn, "timeline", "ddp=2")
    assert len(fig.axes) == 1
    assert title(fig) == "ddp, 2 workers: optimizer 10%, communication 15%, idle 5%"
    work = [b for b in boxes(fig.axes[0]) if b.get_y() > 0.55 and b.get_height() < 0.2]
    assert len({b.get_y() for b in work}) == 2  # all-reduces that overlap


def test_the_ideal_counts_recomputation_and_both_halves_as_backward() -> None:
    def rows(*kinds: tuple[str, float, float]) -> dict[str, list[Event]]:
        return {
            f"rank {s}": [Event(kind, s, 0, a + 9 * s, b + 9 * s) for kind, a, b in kinds]
            for s in range(2)
        }

    for backward in (
        [("R", 1, 2), ("B", 2, 4)], [("R", 1, 2), ("B", 1, 4)], [("I", 1, 3), ("W", 3, 4)]
    ):  # fmt: skip
        ideal = ideal_of(rows(("F", 0, 1), *backward), "1f1b")
        assert ideal is not None
        assert [(e.kind, e.start, e.end) for e in ideal["rank 0"]] == [("F", 0, 1), ("B", 5, 8)]
    assert ideal_of(rows(("F", 0, 1), ("B", 1, 2)), "one of one's own") is None
    assert ideal_of(rows(("F", 0, 1)), "1f1b") is None  # no backward was measured


def test_the_ideal_of_two_chunks_and_their_letters() -> None:
    """A V: stages 0 and 3 on one worker, all actions a second."""
    ranks = [0, 1, 1, 0]
    workers: dict[str, list[Event]] = {"rank 0": [], "rank 1": []}
    for s, r in enumerate(ranks):
        workers[f"rank {r}"] += [Event(kind, s, 0, 9 * s + k, 9 * s + k + 1)
                                 for k, kind in enumerate("FIW")]  # fmt: skip
    ideal = ideal_of(workers, "zbv", ranks)
    assert ideal is not None
    assert [(e.kind, e.stage, e.start) for e in ideal["rank 0"]] == [
        ("F", 0, 0), ("F", 3, 3), ("I", 3, 4), ("W", 3, 5), ("I", 0, 7), ("W", 0, 8)
    ]  # fmt: skip
    assert [label_of(workers["rank 0"], ranks)(e) for e in ideal["rank 0"][:2]] == ["0a", "0b"]
    assert label_of(workers["rank 0"], None)(ideal["rank 0"][1]) == "3"  # a layer


# Mistakes


def message(root: Path, *command: str) -> str:
    with pytest.raises(UserError) as caught:
        plot.draw_figure(plot.parse([*command, "--output", str(root / "p.png")]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_do_not_compare(single: Path, multiple: Path, tmp_path: Path) -> None:
    def said(one: Path, two: Path) -> str:
        return message(tmp_path, "data_parallel", "--single", str(one), "--multiple", str(two))

    assert "two has 2; needed are 1 and 2 or more" in said(multiple, multiple)
    short = write_epochs(tmp_path / "short", "rank0_results", SINGLE[:1], world_size=1)
    assert "both need 2 epochs or more" in said(short, multiple)
    other = write_epochs(tmp_path / "other", "rank0_results", SINGLE, world_size=1, n_train=9)
    options = json.loads((multiple / "options.json").read_text())
    (multiple / "options.json").write_text(json.dumps(options | {"n_train": 8}))
    assert said(other, multiple) == (
        f"only runs of the same n_train compare, and these differ: {other} 9, {multiple} 8"
    )
    nothing = tmp_path / "nothing"
    assert said(nothing, multiple) == (
        f"{nothing} has no rank0_results_epoch0.json; name the --workdir of a finished run"
    )
    for broken, words in (
        ("{", "a result file cannot be read"), ("[]", "a result file cannot be read"),
        ("{}", "a result file has no training_loss; make the run again"),
    ):  # fmt: skip
        (multiple / "rank1_results_epoch0.json").write_text(broken)
        assert words in said(single, multiple)


def test_runs_that_are_missing_or_differ(tmp_path: Path) -> None:
    root = ("--workdir", str(tmp_path))
    folder = write_run(tmp_path, "ddp2", DDP2)
    assert message(tmp_path, "throughput", "ddp=2,ddp=4", *root) == (
        f"no finished run in {tmp_path}/ddp4; make it with: python project/train.py ddp "
        f"--world_size 4 --num_batches 10 --workdir {tmp_path}/ddp4"
    )
    write_run(tmp_path, "ddp1", precision="bf16")
    write_run(tmp_path, "ddp2", DDP2, precision="fp32")
    assert message(tmp_path, "memory", "ddp=1,ddp=2", *root) == (
        f"only runs of the same precision compare, and these differ: {tmp_path}/ddp1 bf16, "
        f"{tmp_path}/ddp2 fp32"
    )
    assert message(tmp_path, "timeline", "ddp=2", "--step", "7", *root) == (
        "--step 7: it was not recorded; take one up to 1"
    )
    (folder / "timeline_rank1.json").unlink()
    assert message(tmp_path, "split_time", "ddp=2", *root) == (
        f"{folder}/timeline_rank1.json is missing; make the run again, with --timeline 10"
    )
    assert message(tmp_path, "timeline", "ddp=3", *root) == (
        f"ddp3: there is no such folder, and no {tmp_path}/ddp3; name the --workdir of a run"
    )
    (folder / "timeline_rank0.json").write_text("{}")
    assert "timeline_rank0.json is not a timeline" in message(tmp_path, "timeline", str(folder))
    (folder / "summary.json").write_text("{")
    assert "summary.json cannot be read" in message(tmp_path, "memory", "ddp=2", *root)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "missing: COMMAND"),
        ("graph", "COMMAND graph: it must be one of data_parallel, pipeline, "),
        ("timeline run --step y", "--step y: it must be a whole number;"),
        ("timeline run --step", "--step needs a value;"),
        ("schedule --schedule fast", "--schedule fast: it must be one of gpipe, 1f1b, "),
        ("schedule --n_chunk 0", "--num_microbatches 0: it must be a whole number, 1 or more;"),
        ("training run --color red", "--color red: there is no such option;"),
    ],
)
def test_a_mistyped_line_is_answered_by_one_sentence(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        plot.parse(line.split())
    assert end.value.code == 2
    (found,) = capsys.readouterr().err.splitlines()
    assert f"error: {said}" in found and found.endswith("; --help explains all")


@pytest.mark.parametrize("text", ["", "ddp", "dp=2", "ddp=2,", "ddp=2;fsdp=2", "ddp=-1"])
def test_bad_names_of_runs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        plot.parse(["throughput", text])
    assert end.value.code == 2
    assert "e.g. " in capsys.readouterr().err


# What is written


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"), (0.01234, "0.0123"), (1.0, "1.00"), (22.13, "22.1"), (1234.5, "1,234"),
        (987654.0, "987,654"), (1.5e6, "1.5 M"), (0.5, "0.500"),
    ],
)  # fmt: skip
def test_readable(value: float, text: str) -> None:
    assert readable(value) == text


def overlaps(fig: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that lie over each other, or beyond the page."""
    fig.draw_without_rendering()
    written = [text for text in (fig._suptitle, fig._supxlabel) if text]  # type: ignore[attr-defined]
    for ax in fig.axes:
        written += [*ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels(), ax._left_title]  # type: ignore[attr-defined]
        written += [ax.xaxis.label]
        if box := ax.get_legend():
            written += box.get_texts()
    found = [(t.get_text(), t.get_window_extent()) for t in written if t.get_text()]
    page = fig.get_window_extent()
    outside = [(name, "page") for name, b in found if b.x1 > page.x1 or b.x0 < 0 or b.y0 < 0]
    return outside + [
        (a, b)
        for i, (a, first) in enumerate(found)
        for b, second in found[i + 1 :]
        if first.overlaps(second)
    ]


def test_nothing_overlaps(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """The most that these pictures hold."""
    names = ["ddp1", "ddp2", "ddp4", "fsdp1", "fsdp2", "fsdp4"]
    for name in names:
        write_run(tmp_path, name, [*DDP2, *DDP2], step_seconds=[1, 1e-3, 2e-3])
    runs = ",".join(f"{name[:-1]}={name[-1]}" for name in names)
    write_run(tmp_path, "pipeline2", PIPELINE, schedule="gpipe")
    for command in (
        ("split_time", runs), ("throughput", runs), ("memory", "ddp=4,fsdp=4"),
        ("timeline", "pipeline=2"), ("timeline", "ddp=4"),
    ):  # fmt: skip
        assert overlaps(picture(tmp_path, drawn, *command)) == [], command


# Where a step's time went


def row(*events: tuple[str, float, float], step: int = 0) -> list[Event]:
    return [Event(kind, 0, 0, start, end, step) for kind, start, end in events]


# 10 clocks from the first forward (at 10) to the last backward (at 20).
STEP = {
    "a": row(("receive", 9, 10), ("F", 10, 12), ("send", 12, 13), ("B", 17, 20)),
    "b": row(("F", 12, 14), ("B", 14, 17), ("R", 14, 15), ("optimizer", 20, 22)),
}


def test_the_bubble_is_idle_over_total() -> None:
    """Sending is idle, the optimizer does not count."""
    assert bubbles(STEP) == pytest.approx({"a": 0.5, "b": 0.5})
    uneven = {"a": row(("F", 0, 1)), "b": row(("F", 1, 4)), "c": row(("all_reduce", 0, 9))}
    assert bubbles(uneven) == pytest.approx({"a": 0.75, "b": 0.25, "c": 1})


def test_shares_add_up_to_the_step() -> None:
    """From 9 to 22: 13 clocks."""
    assert duration(STEP) == 13
    found = shares(STEP)
    assert found == pytest.approx(
        {
            "recompute": 0.5, "forward": 2, "backward": 2.5, "optimizer": 1, "other": 0,
            "communication": 1, "idle": 6,
        }
    )  # fmt: skip
    assert sum(found.values()) == pytest.approx(13)


def test_the_first_step_is_left_out_where_there_are_others() -> None:
    workers = {"a": [*row(("F", 0, 9)), *row(("F", 20, 23), step=2)], "b": row(("F", 9, 9), step=3)}
    assert steps_of(workers) == [2, 3]
    assert in_step(workers, 2) == {"a": row(("F", 20, 23), step=2), "b": []}
    assert steps_of({"a": row(("F", 0, 1), step=4)}) == [4]
