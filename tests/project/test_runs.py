"""Runs compared by plot.py: what is drawn follows from their files, by numbers worked out here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from project import figure_runs, plot
from project.measured import draw_panels, ideal_of
from project.runs import Spec, load_runs, specs
from project.runs_plot import draw_stacks
from tests.project.test_plot import bars, drawn, error_bars, heights, labels, texts
from training.breakdown import bubble
from training.launch import UserError
from training.timeline import Event, Timeline

__all__ = ["drawn"]  # a fixture
Rows = Sequence[Sequence[tuple[str, int, int, float, float]]]


def write(root: Path, name: str, rows: Rows = (), **summary: Any) -> Path:
    """A run as train.py leaves it; rows are events of step 1, and step 0 is far off."""
    folder = root / name
    folder.mkdir(parents=True)
    strategy, workers = name[:-1], int(name[-1])
    content = {
        "strategy": strategy, "num_workers": workers, "model": "vgg16", "schedule": None,
        "num_microbatches": 1, "batch_size": 12, "step_seconds": [60.0, 2.0, 4.0],
        "peak_rss_bytes": [700_000_000 + r for r in range(workers)],
        "state_bytes": [160_000_000] * workers,
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps({**content, **summary}))
    for rank, events in enumerate(rows):
        timeline = Timeline(rank, about={"strategy": strategy})
        timeline.world_size = len(rows)
        timeline._marks = [(-1000.0, 0), (0.0, 1)]
        timeline("F", 0, 0, -900.0, -500.0)
        for event in events:
            timeline(*event)
        timeline.write(folder)
    return folder


def picture(root: Path, drawn: dict[str, Figure], *command: str) -> Figure:
    args = plot.parse([*command, "--workdir", str(root), "--output", str(root / "p.png")])
    assert plot.draw(args) == [root / "p.png"]
    assert (root / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return drawn["p.png"]


# ddp=2: 10 seconds from 0 to 10. Rank 0: F 3, B 4, exposed 2, optimizer 1. Rank 1: F 2, B 5,
# exposed 1, idle 1, optimizer 1.
DDP1: Rows = [[("F", -1, 0, 0, 6), ("B", -1, 0, 6, 16), ("optimizer", -1, -1, 16, 20)]]
DDP2: Rows = [
    [
        ("F", -1, 0, 0, 3), ("B", -1, 0, 3, 7), ("all_reduce", 0, -1, 6, 9),
        ("optimizer", -1, -1, 9, 10),
    ],
    [
        ("F", -1, 0, 1, 3), ("B", -1, 0, 3, 8), ("all_reduce", 0, -1, 7, 8.5),
        ("all_reduce", 1, -1, 7.5, 9), ("optimizer", -1, -1, 9, 10),
    ],
]  # fmt: skip


def test_split_time(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    write(tmp_path, "ddp1", DDP1)
    write(tmp_path, "ddp2", DDP2)
    fig = picture(tmp_path, drawn, "split_time", "ddp=1,ddp=2")
    (ax,) = fig.axes
    boxes = [(b.get_x() + b.get_width() / 2, b.get_y(), b.get_height()) for b in parts(fig)]
    assert boxes == [
        pytest.approx(box)
        for box in [
            (0, 0, 6), (0, 6, 10), (0, 16, 4),
            (1, 0, 2.5), (1, 2.5, 4.5), (1, 7, 1), (1, 8, 1.5), (1, 9.5, 0.5),
        ]
    ]  # fmt: skip
    assert labels(ax) == ["ddp, 1 worker", "ddp, 2 workers"]
    assert texts(fig)[0] == "ddp, 2 workers: communication 15% of a step, idle 5%"
    written = [text.get_text() for text in ax.texts]
    assert written == [
        "30%",
        "50%",
        "20%",
        "20.0",
        "25%",
        "45%",
        "15%",
        "10.0",
    ]  # where there is room
    assert legend(fig) == ["forward", "backward", "optimizer", "communication", "idle"]


def parts(fig: Figure) -> list[Rectangle]:
    (ax,) = fig.axes
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def legend(fig: Figure) -> list[str]:
    return [text.get_text() for text in fig.legends[0].get_texts()]


def test_throughput(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """12 examples in 2 and 4 s are 6 and 3 per second, and the first step does not count."""
    write(tmp_path, "ddp1")
    write(tmp_path, "ddp4", step_seconds=[9.0, 1.0, 1.0])
    write(tmp_path, "fsdp2", step_seconds=[9.0, 3.0])
    fig = picture(tmp_path, drawn, "throughput", "ddp=1,ddp=4,fsdp=2")
    (ax,) = fig.axes
    assert [label.replace("\n", " ") for label in labels(ax)] == [
        "ddp, 1 worker", "ddp, 4 workers", "ideal", "fsdp, 2 workers"
    ]  # fmt: skip
    assert heights(ax) == [4.5, 12.0, 18.0, 4.0]
    assert error_bars(ax) == [pytest.approx((4.5 - 4.5**0.5, 4.5 + 4.5**0.5))]
    assert texts(fig)[0] == "ddp, 4 workers: 2.67x the examples/s of one (ideal 4x)"
    assert {"2.67x", "4x"} <= set(texts(fig))
    assert len({bar.get_facecolor() for bar in bars(ax)}) == 3  # baseline, measured, ideal


def test_the_ideal_is_relative_to_the_fewest_workers(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    write(tmp_path, "ddp2")
    write(tmp_path, "ddp4", step_seconds=[9.0, 1.0, 1.0])
    fig = picture(tmp_path, drawn, "throughput", "ddp=4,ddp=2")
    assert heights(fig.axes[0]) == [12.0, 9.0, 4.5]
    assert texts(fig)[0] == "ddp, 4 workers: 2.67x the examples/s of 2 (ideal 2x)"


def test_memory(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    kinds = {"parameters": 40_000_000, "gradients": [40_000_000, 20_000_000], "optimizer": 0}
    write(tmp_path, "ddp1")
    write(tmp_path, "fsdp2", state_bytes=kinds)
    fig = picture(tmp_path, drawn, "memory", "ddp=1,fsdp=2")
    tops = [(b.get_y(), b.get_height()) for b in parts(fig)]
    assert tops == [
        pytest.approx(top)
        for top in [
            (0, 160), (0, 40), (40, 40), (80, 0), (0, 40), (40, 20), (60, 0),
            (0, 700), (0, 700), (0, 700.000001),
        ]
    ]  # fmt: skip
    assert [label.replace("\n", " ") for label in labels(fig.axes[0])] == [
        "ddp, 1 worker", "fsdp, 2 workers rank 0", "fsdp, 2 workers rank 1"
    ]  # fmt: skip
    assert texts(fig)[0] == "fsdp, 2 workers holds 0.50 of the state of ddp, 1 worker"
    assert legend(fig) == ["state", "parameters", "gradients", "optimizer", "peak resident"]


# Two stages, GPipe, two micro-batches; F takes 1, B takes 2 and 2 on either; a transfer takes 0.5.
PIPELINE: Rows = [
    [
        ("F", 0, 0, 0, 1), ("send", 0, 0, 1, 1.5), ("F", 0, 1, 1, 2), ("B", 0, 0, 5.5, 7.5),
        ("B", 0, 1, 7.5, 9.5),
    ],
    [
        ("receive", 1, 0, 1, 1.5), ("F", 1, 0, 1.5, 2.5), ("F", 1, 1, 2.5, 3.5),
        ("B", 1, 0, 3.5, 5.5), ("B", 1, 1, 5.5, 7.5), ("optimizer", 1, -1, 9.5, 10),
    ],
]  # fmt: skip


def test_timeline(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """Measured: 6 of 9.5 busy on both stages. Ideal: 6 of 9, (n-1)/(m+n-1) = 1/3 idle."""
    write(tmp_path, "pipeline2", PIPELINE, schedule="gpipe")
    fig = picture(tmp_path, drawn, "timeline", "pipeline=2")
    measured, ideal = fig.axes
    assert texts(fig)[0] == "pipeline, gpipe, 2 stages, 2 micro-batches: 36.8% idle, ideal 33.3%"
    assert measured.get_title(loc="left") == "measured: 9.50 s, 37% idle"
    assert ideal.get_title(loc="left").endswith("free transfers: 9.00 s, 33% idle")
    assert [label.get_text() for label in measured.get_yticklabels()] == ["rank 0", "rank 1"]
    assert legend(fig) == ["forward", "backward", "optimizer", "send", "receive", "idle"]
    written = [text.get_text() for text in ideal.texts]
    assert written == ["0", "1", "0", "1", "33% idle"] * 2
    boxes = [p for p in ideal.patches if isinstance(p, Rectangle)]
    spans = [(b.get_x(), b.get_x() + b.get_width()) for b in boxes]
    assert spans == [
        pytest.approx(span)
        for span in [
            (0, 9), (0, 1), (1, 2), (5, 7), (7, 9), (0, 9), (1, 2), (2, 3), (3, 5), (5, 7)
        ]
    ]  # fmt: skip
    folder = picture(tmp_path, drawn, "timeline", str(tmp_path / "pipeline2"))  # by its folder
    assert texts(folder) == texts(fig)
    zero = picture(tmp_path, drawn, "timeline", "pipeline=2", "--step", "0")
    assert "step 0, 400 s" in texts(zero)[1]


def test_a_timeline_without_schedule_has_no_ideal(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    write(tmp_path, "ddp2", DDP2)
    fig = picture(tmp_path, drawn, "timeline", "ddp=2")
    assert len(fig.axes) == 1
    assert texts(fig)[0] == "ddp, 2 workers: communication 15% of a step, idle 5%"


def test_the_ideal_counts_recomputation_as_backward() -> None:
    def rows(*kinds: tuple[str, float, float]) -> dict[str, list[Event]]:
        return {
            f"rank {s}": [Event(kind, s, 0, a + 9 * s, b + 9 * s) for kind, a, b in kinds]
            for s in range(2)
        }

    for workers in (rows(("F", 0, 1), ("R", 1, 2), ("B", 2, 4)),
                    rows(("F", 0, 1), ("R", 1, 2), ("B", 1, 4))):  # fmt: skip
        ideal = ideal_of(workers, "1f1b")
        assert ideal is not None
        assert [(e.kind, e.start, e.end) for e in ideal["rank 0"]] == [("F", 0, 1), ("B", 5, 8)]
        assert bubble(ideal) == 0.5
    workers["rank 1"] = [
        Event(kind, 1, 0, a, b) for kind, a, b in (("F", 3, 4), ("I", 4, 6), ("W", 6, 7))
    ]
    ideal = ideal_of(workers, "1f1b")  # a backward in halves is a backward of 3
    assert ideal is not None
    assert [(e.kind, e.start, e.end) for e in ideal["rank 0"]] == [("F", 0, 1), ("B", 5, 8)]
    assert ideal_of(rows(("F", 0, 1), ("B", 1, 2)), "interleaved") is None
    assert ideal_of(rows(("F", 0, 1)), "1f1b") is None  # its backwards take nobody knows how long


def message(root: Path, *command: str) -> str:
    with pytest.raises(UserError) as caught:
        plot.draw(plot.parse([*command, "--workdir", str(root)]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_missing_names_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        plot.draw(plot.parse(["split_time", "ddp=1,ddp=2,ddp=1"]))
    assert str(caught.value) == (
        "no run in workdir/ddp1, workdir/ddp2; make it with: python project/train.py ddp "
        "--num_workers 1 --timeline 10 && python project/train.py ddp --num_workers 2 --timeline 10"
    )
    folder = write(tmp_path, "ddp2", DDP2)
    command = f"python project/train.py ddp --num_workers 2 --timeline 10 --workdir {folder}"
    (folder / "timeline_rank1.json").unlink()
    assert message(tmp_path, "timeline", "ddp=2").endswith(
        f"timeline_rank1.json is not there; make it again with: {command}"
    )
    (folder / "timeline_rank0.json").write_text("{}")
    assert "timeline_rank0.json is not a timeline" in message(tmp_path, "split_time", "ddp=2")
    (folder / "summary.json").write_text("{}")
    assert "summary.json has no step_seconds; " in message(tmp_path, "throughput", "ddp=2")
    assert message(tmp_path, "memory", "ddp=2").endswith(command)
    (folder / "summary.json").write_text("{")
    assert "summary.json cannot be read" in message(tmp_path, "memory", "ddp=2")
    bare = tmp_path / "bare"
    bare.mkdir()
    assert message(tmp_path, "timeline", str(bare)).endswith(
        f"python project/run_data_parallel.py --timeline 3 --workdir {bare}"
    )
    (folder / "summary.json").write_text('{"strategy": "ddp", "num_workers": 2, "model": "gpt2"}')
    assert message(tmp_path, "timeline", str(folder)).endswith(
        f"python project/train.py ddp --num_workers 2 --model gpt2 --timeline 10 --workdir {folder}"
    )
    (bare / "options.json").write_text('{"model_parallel_mode": "pipeline_parallel"}')
    assert "run_pipeline.py --model_parallel_mode pipeline_parallel --timeline 3" in message(
        tmp_path, "timeline", str(bare)
    )
    assert "is no folder" in message(tmp_path, "timeline", str(tmp_path / "nothing"))


def test_a_run_that_was_interrupted_is_one_of_the_program_that_made_it(tmp_path: Path) -> None:
    """By its checkpoints, or by the name that train.py gives the folder; there is no summary."""
    named, kept = tmp_path / "fsdp3", tmp_path / "mine"
    state = kept / "checkpoints" / "000002-step4" / "state.json"
    for folder in (named, state.parent):
        folder.mkdir(parents=True)
    options = {"strategy": "pipeline", "num_workers": 4, "model": "vgg16", "vgg_width": 8}
    state.write_text(json.dumps({"options": options}))
    assert message(tmp_path, "timeline", str(named)).endswith(
        f"python project/train.py fsdp --num_workers 3 --timeline 10 --workdir {named}"
    )
    assert message(tmp_path, "timeline", str(kept)).endswith(
        "python project/train.py pipeline --num_workers 4 --vgg_width 8 --timeline 10 "
        f"--workdir {kept}"
    )
    state.write_text("{")
    assert "run_data_parallel.py" in message(tmp_path, "timeline", str(kept))


def test_a_missing_run_is_to_be_like_those_that_are_there(tmp_path: Path) -> None:
    write(tmp_path, "ddp2", model="gpt2-mini", precision="bf16", vgg_width=64)
    assert message(tmp_path, "throughput", "ddp=1,ddp=2") == (
        f"no run in {tmp_path}/ddp1; make it with: python project/train.py ddp --num_workers 1 "
        f"--model gpt2-mini --precision bf16 --timeline 10 --workdir {tmp_path}/ddp1"
    )
    write(tmp_path, "ddp1", model="gpt2-mini", precision="bf16")  # an older one: without a width
    assert len(load_runs(specs("ddp=1,ddp=2"), tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("model", "vgg16", "gpt2-mini"), ("precision", "fp32", "bf16"), ("vgg_width", 64, 8)],
)
def test_runs_that_differ_do_not_compare(
    tmp_path: Path, name: str, first: Any, second: Any
) -> None:
    write(tmp_path, "ddp1", **{name: first})
    write(tmp_path, "ddp2", **{name: second})
    assert message(tmp_path, "throughput", "ddp=1,ddp=2,fsdp=1") == (
        f"only runs of the same {name} compare, and these differ: {tmp_path}/ddp1 {first}, "
        f"{tmp_path}/ddp2 {second}"
    )


def test_a_step_that_was_not_recorded(tmp_path: Path) -> None:
    write(tmp_path, "fsdp1", DDP1)
    assert message(tmp_path, "timeline", "fsdp=1", "--step", "7") == (
        "--step 7: recorded are 0 to 1; e.g. 1"
    )


@pytest.mark.parametrize("text", ["", "ddp", "ddp=0", "dp=2", "ddp=2,", "ddp=2;fsdp=2", "ddp=-1"])
def test_bad_names_of_runs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        plot.parse(["throughput", text])
    assert end.value.code == 2
    assert "e.g. ddp=1,ddp=2" in capsys.readouterr().err
    if text == "ddp=2;fsdp=2":
        return
    with pytest.raises(SystemExit):
        plot.parse(["timeline", "pipeline=2,pipeline=3"])


def test_names_of_runs(tmp_path: Path) -> None:
    assert specs("ddp=1, fsdp=16") == [Spec("ddp", 1), Spec("fsdp", 16)]
    write(tmp_path, "ddp2", state_bytes=[1, 2], step_seconds=[1.0])
    (run,) = load_runs([Spec("ddp", 2)], tmp_path)
    assert run.step_seconds() == [1.0]  # all there is
    assert run.states() == {"state": [1, 2]}


def overlaps(fig: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that lie over each other, or beyond the page."""
    fig.draw_without_rendering()
    written = [t for t in fig.texts if t.get_text()]
    for ax in fig.axes:
        written += [*ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels(), ax._left_title]  # type: ignore[attr-defined]
    for box in fig.legends:
        written += box.get_texts()
    boxes = [(t.get_text(), t.get_window_extent()) for t in written if t.get_text()]
    page = fig.get_window_extent()
    outside = [(name, "page") for name, b in boxes if b.x1 > page.x1 or b.x0 < 0 or b.y0 < 0]
    return outside + [
        (a, b)
        for i, (a, first) in enumerate(boxes)
        for b, second in boxes[i + 1 :]
        if first.overlaps(second)
    ]


def test_nothing_overlaps(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """The most that these pictures hold."""
    names = ["ddp1", "ddp2", "ddp4", "fsdp1", "fsdp2", "fsdp4"]
    for name in names:
        write(tmp_path, name, [*DDP2, *DDP2])
    runs = ",".join(f"{name[:-1]}={name[-1]}" for name in names)
    write(tmp_path, "pipeline2", PIPELINE, schedule="gpipe")
    for command in (
        ("split_time", runs), ("throughput", "ddp=1,ddp=2,ddp=4"), ("memory", "ddp=4,fsdp=4"),
        ("timeline", "pipeline=2"), ("timeline", "ddp=4"),
    ):  # fmt: skip
        assert overlaps(picture(tmp_path, drawn, *command)) == [], command


def test_the_tables_of_figures_are_good_command_lines() -> None:
    for figure in figure_runs.FIGURES:
        args = plot.parse(figure)
        assert args.figure == figure[0]
    wanted = {
        spec.folder(Path()).name
        for figure in figure_runs.TRAINED_FIGURES
        for spec in specs(figure[1])
    }
    assert wanted == set(figure_runs.TRAINED)


def test_stacks_and_panels_are_drawn_of_little() -> None:
    kwargs: dict[str, Any] = {"title": "t", "subtitle": "s"}
    draw_stacks([[("a", 0.0)]], ["x"], {"a": "#000000"}, ylabel="y", **kwargs)
    with pytest.raises(ValueError, match="max"):
        draw_panels([], **kwargs)
