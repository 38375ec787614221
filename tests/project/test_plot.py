"""The figures: what is drawn follows from the result files, by numbers worked out here by hand."""

from __future__ import annotations

import json
import re
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from project import plot
from project.figures.epochs import plot_training
from project.figures.runs import steps_of
from project.figures.style import with_error
from tests.project.made_up import DDP1, DDP2, PIPELINE, write_epochs, write_one_and_two, write_run
from training.launch.errors import UserError
from training.timeline import Event


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that would be saved, by the name of their file. (test_courses.py saves some.)"""
    figures: dict[str, Figure] = {}

    def keep(self: Figure, path: Path, **_: object) -> None:
        figures[Path(path).name] = self

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


def curves(fig: Figure) -> list[dict[str, list[float]]]:
    """Per panel, the values by the label of the line."""
    return [
        {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in ax.lines}
        for ax in fig.axes
    ]


def labels(ax: Axes) -> list[str]:
    return [label.get_text().replace("\n", " ") for label in ax.get_xticklabels()]


def title(fig: Figure) -> str:
    return fig.get_suptitle().replace("\n", " ")


def foot(fig: Figure) -> str:
    assert fig._supxlabel is not None  # type: ignore[attr-defined]
    return fig._supxlabel.get_text().replace("\n", " ")  # type: ignore[attr-defined]


def inside(ax: Axes) -> list[str]:
    """What is written into bars, and above them."""
    return [text.get_text() for text in ax.texts if text.get_text()]


def legend(fig: Figure) -> list[str]:
    (box,) = fig.legends
    return [text.get_text() for text in box.get_texts()]


def draw(root: Path, drawn: dict[str, Figure], *command: str) -> Figure:
    """What a command of plot.py draws."""
    where = ("--workdir", str(root)) if "=" in command[1] else ()
    args = plot.parse_plot([*command, *where, "--output", str(root / "p.png")])
    assert plot.draw_figure(args) == root / "p.png"
    return drawn["p.png"]


def test_plot_and_plot_results(
    tmp_path: Path, drawn: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar with its error per label; a metric of each run."""
    path = tmp_path / "made" / "times.png"
    plot.plot([3.0, 1.5], [0.25, 0.5], ["Single GPU", "Data Parallel - GPU0"], str(path))
    assert path.parent.is_dir()
    (ax,) = drawn["times.png"].axes
    assert (heights(ax), error_bars(ax)) == ([3.0, 1.5], [(2.75, 3.25), (1.0, 2.0)])
    assert labels(ax) == ["Single GPU", "Data Parallel - GPU0"]
    assert inside(ax) == ["3.0\n± 0.2", "1.5\n± 0.5"]
    with pytest.raises(ValueError, match="zip"):
        plot.plot([1.0, 2.0], [0.1], ["a", "b"], path)
    monkeypatch.chdir(tmp_path)
    data = {"a": [{"bleu": 1.0}, {"bleu": 3.0}], "b": [{"bleu": 5.0}]}
    assert plot.plot_results(data, "bleu") == Path("submit_figures/bleu.png")
    (ax,) = drawn["bleu.png"].axes
    assert (labels(ax), heights(ax)) == (["a", "b"], [2.0, 5.0])
    assert error_bars(ax) == [pytest.approx((2 - 2**0.5, 2 + 2**0.5))]  # of a sample: / (n - 1)


def test_one_process_and_two(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    single, multiple = write_one_and_two(tmp_path)
    time = draw(tmp_path, drawn, "training_time", str(single), str(multiple))
    (ax,) = time.axes
    assert labels(ax) == ["dp1", "dp2 rank 0", "dp2 rank 1", "ideal"]
    assert heights(ax) == [20.0, 10.0, 11.0, 10.0]
    spread = 2**0.5  # of 19 and 21, of 9 and 11, of 10 and 12
    assert error_bars(ax) == [pytest.approx((m - spread, m + spread)) for m in (20, 10, 11)]
    assert [text for text in inside(ax) if text.endswith("x")] == ["2.00x", "1.82x", "2x"]
    assert title(time) == "training time of an epoch (s): dp1 20.0, dp2 11.0"  # the slower's
    throughput = draw(tmp_path, drawn, "tokens_per_sec", str(single), str(multiple))
    (ax,) = throughput.axes
    one = (8400 / 19 + 8400 / 21) / 2
    two = (4200 / 9 + 4200 / 10 + 4200 / 11 + 4200 / 12) / 2  # summed over ranks, mean over epochs
    assert labels(ax) == ["dp1", "dp2", "ideal"]
    assert heights(ax) == pytest.approx([one, two, 2 * one])
    low, high = error_bars(ax)[1]
    assert (high - low) / 2 == pytest.approx((886.6667 - 731.8182) / 2**0.5, rel=1e-4)
    assert inside(ax)[1:3] == ["1.92x", "809\n± 109"]
    # One process had both cores, two have one each: there is no ideal.
    for run, options in (
        (single, {"batch_size": 64, "cores": 2}),
        (multiple, {"world_size": 2, "batch_size": 128, "cores": 1}),
    ):
        (run / "options.json").write_text(json.dumps(options))
    time = draw(tmp_path, drawn, "training_time", str(single), str(multiple))
    assert labels(time.axes[0]) == ["dp1", "dp2 rank 0", "dp2 rank 1"]
    # Of another model there is nothing to compare with.
    (multiple / "options.json").write_text('{"world_size": 2, "n_layer": 3}')
    time = draw(tmp_path, drawn, "training_time", str(single), str(multiple))
    assert labels(time.axes[0]) == ["dp1", "dp2"]
    assert [text for text in inside(time.axes[0]) if text.endswith("x")] == []
    (multiple / "options.json").write_text('{"world_size": 2, "cores": 1}')
    # Of one epoch there is no other than the first.
    for path in tmp_path.glob("*/*epoch[12].json"):
        path.unlink()
    time = draw(tmp_path, drawn, "training_time", str(single), str(multiple))
    assert heights(time.axes[0]) == [90.0, 70.0, 60.0]


def test_a_pipeline_and_one_stage_at_a_time(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    options: dict[str, Any] = {"num_devices": 3, "schedule": "zb", "num_microbatches": 8}
    runs = []
    for name, times in (("model", [50.0, 36.0, 36.0]), ("pipeline", [40.0, 23.0, 25.0])):
        mode = f"{name}_parallel"
        options.update(model_parallel_mode=mode, strategy=mode, batch_size=64)
        runs.append(str(write_epochs(tmp_path / name, "eval_results", times, **options)))
    fig = draw(tmp_path, drawn, "training_time", *runs)
    assert labels(fig.axes[0]) == ["model", "pipeline", "ideal"]
    assert heights(fig.axes[0]) == pytest.approx([36.0, 24.0, 36 / 2.4])  # 3*8 / 10
    assert "1.50x" in inside(fig.axes[0])
    assert foot(fig) == "num_devices 3, schedule zb, num_microbatches 8, batch_size 64"
    fig = draw(tmp_path, drawn, "tokens_per_sec", *runs)
    rates = [8400 / 36, (8400 / 23 + 8400 / 25) / 2, 8400 / 36 * 2.4]
    assert heights(fig.axes[0]) == pytest.approx(rates)


def test_training(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    single, _ = write_one_and_two(tmp_path)
    fig = draw(tmp_path, drawn, "training", str(single))
    assert curves(fig) == [{str(single): values} for values in (
        [4.0, 3.0, 2.0], [4.5, 3.5, 2.5], [0.0, 10.0, 20.0]
    )]  # fmt: skip
    assert [ax.get_title(loc="left") for ax in fig.axes] == [
        "training loss", "validation loss", "BLEU"
    ]  # fmt: skip
    epochs = [np.asarray(line.get_xdata()).tolist() for ax in fig.axes for line in ax.lines]
    assert epochs == [[1, 2, 3]] * 3
    assert title(fig).endswith("dp1: training loss 2.00, validation loss 2.50, BLEU 20.0")
    other = write_epochs(tmp_path / "other", "eval_results", [1.0] * 2)
    fig = draw(tmp_path, drawn, "training", str(single), str(other))
    assert curves(fig)[0] == {str(single): [4.0, 3.0, 2.0], str(other): [4.0, 3.0]}
    last = sorted(single.glob("*_epoch*.json"))[-1]  # which was not scored
    last.write_text(re.sub(r'"bleu": [\d.]+', '"bleu": null', last.read_text()))
    fig = draw(tmp_path, drawn, "training", str(single))
    assert title(fig).endswith("training loss 2.00, validation loss 2.50")
    for path in single.glob("*_epoch*.json"):  # where nothing is a number
        path.write_text('{"training_loss": null, "validation_loss": null}')
    plot_training(tmp_path / "nan.png", [single], "")
    assert title(drawn["nan.png"]).endswith("dp1: training loss nan")


def test_a_schedule_is_printed_and_drawn_from_the_same_table(
    tmp_path: Path, drawn: dict[str, Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "1f1b.png"
    line = f"schedule --schedule=1f1b --num_devices=3 --n_chunk=4 --output={path}"
    assert plot.draw_figure(plot.parse_plot(line.split())) == path
    *printed, meaning = capsys.readouterr().out.splitlines()
    assert meaning.startswith("F0 forward; B0 backward, or its halves: I0, gradient of the input")
    assert [line[:9] for line in printed] == ["stage 0: ", "stage 1: ", "stage 2: "]
    fig = drawn["1f1b.png"]
    (ax,) = fig.axes
    actions = [box for box in boxes(ax) if box.get_width() < 12]  # the others are the rows
    cells = [["."] * 12 for _ in range(3)]
    kinds = "FB"  # in the order in which they come, from the first row on
    colours = list(dict.fromkeys(box.get_facecolor() for box in actions))
    for box, number in zip(actions, inside(ax), strict=True):
        row, clock = round(box.get_y() + box.get_height() / 2), round(box.get_x())
        kind, width = kinds[colours.index(box.get_facecolor())], round(box.get_width())
        cells[row][clock : clock + width] = [kind + number] * width
    assert [line.split()[2:] for line in printed] == cells
    assert title(fig) == "1f1b: 3 stages, 4 micro-batches, 33% idle"
    assert foot(fig).endswith("a rank holds, at most: 3, 2, 1")


def test_several_stages_per_rank_have_letters(
    tmp_path: Path, drawn: dict[str, Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    fig = draw(tmp_path, drawn, "schedule", "--schedule", "zbv", "--num_devices=2", "--n_chunk=3")
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 0: F0a F1a ") and second.startswith("rank 1: ")
    assert title(fig).startswith("zbv: 2 ranks, 2 chunks each, 4 stages, 3 micro-batches, ")
    assert {"0a", "2b"} <= {*inside(fig.axes[0])}
    # Fifty clocks are narrow: every action has its number, in smaller letters that do not overlap.
    fig = draw(tmp_path, drawn, "schedule", "--schedule", "zbv")
    assert foot(fig).endswith("a rank holds, at most: 4, 4, 4, 4")  # in micro-batches, not chunks
    assert len(inside(fig.axes[0])) == 4 * 8 * 6 and overlaps(fig) == []


def test_a_deviation_has_one_digit_or_whole_ones() -> None:
    pairs = [(8.8, 0.0426), (5748.2, 133.4), (21.84, 0.5), (12.3, 0.96), (4.567, 0.0)]
    found = [with_error(*pair) for pair in pairs]
    assert found == ["8.80 ± 0.04", "5,748 ± 133", "21.8 ± 0.5", "12.3 ± 1.0", "4.57"]


def test_split_time_throughput_and_memory(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    write_run(tmp_path, "ddp1", DDP1)
    write_run(tmp_path, "ddp2", DDP2)
    write_run(tmp_path, "ddp4", step_seconds=[9.0, 1.0, 1.0])
    state = {"parameters": [40e6, 40e6], "gradients": [40e6, 20e6], "optimizer": [0, 0]}
    write_run(tmp_path, "fsdp2", step_seconds=[3.0], cores=2, state_bytes=state)
    fig = draw(tmp_path, drawn, "split_time", "ddp=1", "ddp=2")  # or with a comma between them
    (ax,) = fig.axes
    drawn_parts = [box for box in boxes(ax) if box.get_height()]
    found = [(b.get_x() + b.get_width() / 2, b.get_y(), b.get_height()) for b in drawn_parts]
    assert found == [
        (0, 0, 6000), (0, 6000, 3000), (0, 9000, 7000), (0, 16000, 4000),
        (1, 0, 2500), (1, 2500, 4500), (1, 7000, 1000), (1, 8000, 1500), (1, 9500, 500),
    ]  # fmt: skip
    assert labels(ax) == ["ddp1", "ddp2"]
    assert title(fig) == "ddp2: communication 15% of a step, idle 5%"
    shares = ["30%", "15%", "35%", "20%", "20,000", "25%", "45%", "15%", "10,000"]
    assert inside(ax) == shares  # where there is room
    kinds = ["forward", "recompute", "backward", "optimizer", "communication", "idle"]
    assert legend(fig) == kinds

    # 24 examples in 2 + 4 s are 4 per second, with steps of 6 and 3; the ideal is relative to the
    # fewest workers of a strategy; of fsdp2, one step is all there is.
    fig = draw(tmp_path, drawn, "throughput", "ddp=4,ddp=1,fsdp=2")
    (ax,) = fig.axes
    assert labels(ax) == ["ddp4", "ideal", "ddp1", "fsdp2"]
    assert heights(ax) == [12.0, 16.0, 4.0, 4.0]
    assert error_bars(ax) == [pytest.approx((4 - 4.5**0.5, 4 + 4.5**0.5))]
    assert title(fig) == "examples per second: ddp4 12.0, ddp1 4.00, fsdp2 4.00"
    assert len({bar.get_facecolor() for bar in boxes(ax)}) == 3  # baseline, measured, ideal
    of_two = draw(tmp_path, drawn, "throughput", "ddp=4,ddp=2")  # the ideal: twice the two's
    assert heights(of_two.axes[0]) == [12.0, 8.0, 4.0]

    fig = draw(tmp_path, drawn, "memory", "ddp=1,fsdp=2")
    (ax,) = fig.axes
    megabytes = [40, 40, 80, 540, 40, 40, 0, 620, 40, 20, 0, 640.000001]
    assert heights(ax) == pytest.approx(megabytes)
    assert labels(ax) == ["ddp1 rank 0", "fsdp2 rank 0", "fsdp2 rank 1"]
    assert title(fig) == "MB of state per rank: ddp1 160, fsdp2 80.0"
    assert legend(fig) == ["parameters", "gradients", "optimizer", "rest of the peak"]


@pytest.mark.usefixtures("elsewhere")
def test_a_picture_goes_beside_the_first_run_or_where_it_is_told(drawn: dict[str, Figure]) -> None:
    root, own = Path("workdir"), Path("lr=0.1")
    for name in ("pipeline2", "ddp2", "ddp4", "single1"):
        write_run(root, name, PIPELINE, pp=2, schedule="1f1b")
    shutil.copytree(root / "pipeline2", own)
    for line, where in (
        ("timeline pipeline=2", "workdir/pipeline2/timeline_pipeline2.png"),
        (f"timeline {own} --step 2", "lr=0.1/timeline_lr=0.1.png"),
        ("memory ddp pipeline", "workdir/ddp4/memory.png"),  # ddp: the most processes
        ("throughput ddp2,ddp", "workdir/ddp2/throughput.png"),
        (f"split_time {own} single", "lr=0.1/split_time.png"),
        ("schedule --schedule zb", "workdir/schedule_zb.png"),
        ("memory single -o here", "here/memory.png"),
        ("memory single -o here/bytes.pdf", "here/bytes.pdf"),
        ("schedule --output s.svg", "s.svg"),
    ):  # fmt: skip
        assert plot.draw_figure(plot.parse_plot(line.split())) == Path(where)
        assert Path(where).name in drawn
    assert not Path("submit_figures").exists()
    with pytest.raises(UserError, match=r"--output pic\.jpg: a picture ends in \.png"):
        plot.draw_figure(plot.parse_plot(["schedule", "-o", "pic.jpg"]))


def test_timeline(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """Measured: 6 of 9.5 busy on both stages. Ideal: 6 of 9, (n-1)/(m+n-1) = 1/3 idle."""
    folder = write_run(tmp_path, "pipeline2", PIPELINE, schedule="gpipe", num_microbatches=2, pp=2)
    fig = draw(tmp_path, drawn, "timeline", "pipeline=2")
    measured, ideal = fig.axes
    assert title(fig) == ("step 2: measured 10000.0 ms, 36.8% idle; ideal 9000.0 ms, 33.3% idle")
    assert "world_size 2, pp 2, schedule gpipe, num_microbatches 2" in foot(fig)
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["measured", "ideal"]
    rows = [label.get_text() for label in measured.get_yticklabels()]
    assert rows == ["rank 0\n37% idle", "rank 1\n37% idle"]
    below = [label.get_text() for label in ideal.get_yticklabels()]
    assert below == ["rank 0\n33% idle", "rank 1\n33% idle"]
    assert legend(fig) == ["forward", "backward", "optimizer", "send", "receive", "idle"]
    assert inside(ideal) == ["0", "1", "0", "1"] * 2
    spans = [(b.get_x(), b.get_x() + b.get_width()) for b in boxes(ideal)]
    assert spans == [
        (0, 9), (0, 1), (1, 2), (5, 7), (7, 9),
        (0, 9), (1, 2), (2, 3), (3, 5), (5, 7),
    ]  # fmt: skip
    first = draw(tmp_path, drawn, "timeline", str(folder), "--step", "1")
    assert title(first).startswith("step 1: ")
    # Without stages there is no ideal.
    write_run(tmp_path, "ddp2", DDP2)
    fig = draw(tmp_path, drawn, "timeline", "ddp=2")
    assert title(fig) == "step 2: measured 10000.0 ms, 12.5% idle"
    assert [ax.get_title(loc="left") for ax in fig.axes] == [""] and "ideal" not in foot(fig)


def test_the_first_step_is_left_out_where_there_are_others() -> None:
    first, *others = [Event("F", 0, 0, 0.0, 1.0, step) for step in (4, 5, 6)]
    assert steps_of({"rank 0": [first], "rank 1": [first, *others]}) == [5, 6]
    assert steps_of({"rank 0": [first]}) == [4]


def test_runs_that_are_missing(tmp_path: Path) -> None:
    """One line each, with what is there and what to do."""
    single, multiple = write_one_and_two(tmp_path)

    def check(line: str, said: str) -> None:
        with pytest.raises(UserError) as caught:
            draw(tmp_path, {}, *line.split())
        assert said in str(caught.value) and "\n" not in str(caught.value)

    pair = f"training_time {multiple} "
    (tmp_path / "nothing").mkdir()
    check(f"{pair}{tmp_path}/nothing", "nothing has no rank0_results_epoch0.json; name the --w")
    (multiple / "rank1_results_epoch2.json").unlink()
    check(pair + str(single), "its ranks have results of different epochs")

    folder = write_run(tmp_path, "ddp2", DDP2)
    how = "python project/train.py ddp --world_size 4 --num_batches 9 --timeline 8 --workdir "
    check("throughput ddp=2,ddp=4", f"no finished run in {tmp_path}/ddp4; make it with: {how}")
    check("timeline ddp=2 --step 7", "--step 7: not recorded; take 1 to 2")
    (folder / "timeline_rank1.json").unlink()
    missing = f"{folder}/timeline_rank1.json is missing; make the run again, with --timeline 10"
    check("split_time ddp=2", missing)
    for name in ("/no/such", "dp=2"):
        check(f"throughput {name}", f"{name}: there is no such folder; name the --workdir of a run")
    with pytest.raises(UserError, match=r"^lr0\.01: there is no such folder"):
        plot.draw_figure(plot.parse_plot(["training", "lr0.01"]))
    for name, how in (("ddp=4", "ddp --world_size 4"), ("3d=8", "3d --dp 8"), ("3d", "3d")):
        made = f"make it with: python project/train.py {how} --num_batches 9 "
        check(f"memory {name}", made)
    check("throughput ddp=-1", f"no finished run in {tmp_path}/ddp-1; make it with: ")
    (folder / "summary.json").write_text("{")
    check("memory ddp=2", "summary.json cannot be read")


def overlaps(fig: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that lie over each other, or beyond the page."""
    fig.draw_without_rendering()
    written = [text for text in (fig._suptitle, fig._supxlabel) if text]  # type: ignore[attr-defined]
    for ax in fig.axes:
        low, high = sorted(ax.get_ylim())
        written += [t for t in ax.get_yticklabels() if low <= t.get_position()[1] <= high]
        written += [*ax.texts, *ax.get_xticklabels(), ax.xaxis.label]
        written += [ax._left_title]  # type: ignore[attr-defined]
    for box in fig.legends:
        written += box.get_texts()
    found = [(t.get_text(), t.get_window_extent()) for t in written if t.get_text()]
    page = fig.get_window_extent()
    outside = [(name, "page") for name, b in found if b.x1 > page.x1 or b.x0 < 0 or b.y0 < 0]
    pairs = combinations(found, 2)
    return outside + [(a, b) for (a, first), (b, second) in pairs if first.overlaps(second)]


def test_nothing_overlaps(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """The most that these pictures hold."""
    names = ["ddp1", "ddp2", "ddp4", "fsdp1", "fsdp2", "fsdp4"]
    for name in names:
        write_run(tmp_path, name, [*DDP2, *DDP2], step_seconds=[1, 1e-3, 2e-3])
    runs = ",".join(f"{name[:-1]}={name[-1]}" for name in names)
    write_run(tmp_path, "pipeline2", PIPELINE, schedule="gpipe", pp=2)
    for name, schedule, kinds in (  # legends of all that a run records, or could
        ("pipeline3", "1f1b", "F B I W R optimizer send receive all_reduce barrier"),
        ("fsdp3", None, "F R B optimizer all_reduce all_gather reduce_scatter barrier"),
    ):
        rows = [[(kind, s, 0, k, k + 1) for k, kind in enumerate(kinds.split())] for s in range(3)]
        write_run(tmp_path, name, rows, schedule=schedule)
    for command in (
        ("split_time", runs), ("throughput", runs), ("memory", "ddp=4,fsdp=4"),
        ("timeline", "pipeline=2"), ("timeline", "ddp=4"), ("timeline", "pipeline=3"),
        ("timeline", "fsdp=3"),
    ):  # fmt: skip
        fig = draw(tmp_path, drawn, *command)
        assert overlaps(fig) == [], command
        assert all(ax.get_position().x1 > 0.75 for ax in fig.axes), command  # they are wide
    assert len(legend(fig)) == 9  # the last one's kinds, and idle
