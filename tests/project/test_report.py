"""The page of runs: what it says is what their files hold, and a step that is taken apart takes
what Python says. A real browser opens it, where there is one."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from pipeline.schedules.catalogue import find
from pipeline.schedules.schedule import Action, Kind
from planning.describe import machine
from planning.simulate import Simulator, Work, with_times
from project import report
from project.figures.compared import compare_step
from project.figures.gantt import events_of
from project.figures.pages import fill_template, letters, stepper
from project.figures.runs import Run, Workers, actions_of, shares
from tests.browser import browser
from tests.project.made_up import PIPELINE, write_run
from tests.project.programs import ROOT, TINY, in_folder, on_rank
from tests.ranks import Ranks
from training.launch.errors import UserError
from training.options import Options
from training.timeline import Event

PAGE = ROOT / "project" / "page"
SIZES = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 128}


def text_of(page: str) -> str:
    """What a reader without scripts and pictures has."""
    page = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())


def staged(root: Path) -> Path:
    """Two stages under GPipe: F takes 1 s, B 2 s, messages 0.5 and 0 s."""
    about = {"schedule": "gpipe", "num_microbatches": 2, "pp": 2, "loss": [2.0, 1.0, 0.5]}
    worst = {"name": "h.0.bias", "largest": 1e-7, "distance": 3e-7, "rounding": 1e-7}
    checks = {"weights": {"agrees": True, "missing": [], "worst": worst}}
    more = {"validation_loss": 1.5, "bleu": 7.25, "load": 0.0}
    return write_run(
        root, "pipeline2", PIPELINE, stage_sizes=[5, 3], checks=checks, **about, **more
    )


def of_gpt2(root: Path, name: str, **about: Any) -> Path:
    """A run of a small GPT-2."""
    folder = write_run(root, name, **about)
    (folder / "config.json").write_text(json.dumps(SIZES))
    return folder


def test_a_step_beside_its_prediction(tmp_path: Path) -> None:
    """A message takes the median of 0.5 and 0 s, so that stage 1 is predicted to begin at 1.25."""
    found = compare_step(Run(staged(tmp_path)))
    assert [(str(t.action), t.start, t.end) for t in found.predicted.rows[1]] == [
        ("F0", 1.25, 2.25), ("F1", 2.25, 3.25), ("B0", 3.25, 5.25), ("B1", 5.25, 7.25),
    ]  # fmt: skip
    gaps = [
        (
            name,
            gap.start,
            gap.end,
            str(gap.before),
            str(gap.waits_for),
            max(gap.causes, key=gap.causes.__getitem__),
        )
        for name, of_worker in found.waits.items()
        for gap in of_worker
    ]
    assert gaps == [
        ("rank 0", 2, 5.5, "B0", "B0", "fill"),
        ("rank 1", 0, 1.5, "F0", "F0", "fill"),
        ("rank 1", 7.5, 9.5, "None", "None", "fill"),
    ]
    assert found.idle["rank 0"] == {"fill": 3.0, "transfer": 0.5, "not predicted": 0.0}
    assert found.bubble == pytest.approx(1 - (6 + 6) / (2 * 9.5))
    # Beside another prediction, in which all takes twice as long.
    slow = Work(with_times([2, 2], [2, 2], [2, 2]))
    beside = compare_step(Run(tmp_path / "pipeline2"), slow)
    assert beside.predicted.equal().seconds == 18
    assert beside.idle["rank 0"] == {
        "fill": 3.5,
        "not predicted": 0,
    }  # no cause is longer than what was measured


def of_stage(stage: int, *events: tuple[str, float, float]) -> list[Any]:
    """What a rank did with one micro-batch."""
    return [(kind, stage, 0, start, end) for kind, start, end in events]


def test_what_recomputation_takes(tmp_path: Path) -> None:
    """Outside its backward it is on its own; within, a part of it. Two chunks of a rank: a V."""
    last = of_stage(1, ("F", 0, 1), ("R", 1, 2), ("I", 2, 3), ("W", 3, 4))
    for backward, alone in (
        ([("R", 1, 2), ("B", 2, 4)], 1), ([("R", 1, 2), ("B", 1, 4)], 0), ([("B", 1, 4)], 0)
    ):  # fmt: skip
        rows = [of_stage(0, ("F", 0, 1), *backward), last]
        work = compare_step(Run(write_run(tmp_path, "pipeline2", rows, pp=2, schedule="1f1b"))).work
        assert [work.recompute(s) for s in range(2)] == [alone, 1]
        assert work.seconds(Action(Kind.BACKWARD, 0, 0)) == 3 - alone
    parts = [of_stage(s, ("F", k, k + 1), ("I", k + 1, k + 2), ("W", k + 2, k + 3))
             for s, k in enumerate(range(0, 36, 9))]  # fmt: skip
    rows = [parts[0] + parts[3], parts[1] + parts[2]]
    folder = write_run(tmp_path, "v2", rows, pp=2, schedule="zbv")
    ideal = compare_step(Run(folder)).predicted.equal()
    assert [(str(t.action), t.action.stage, t.start) for t in ideal.rows[0]] == [
        ("F0", 0, 0), ("F0", 3, 3), ("I0", 3, 4), ("W0", 3, 5), ("I0", 0, 7), ("W0", 0, 8)
    ]  # fmt: skip


def test_what_replicas_take(tmp_path: Path) -> None:
    """A message is sent when the last replica has what it adds to, and gradients are exchanged
    until the first update begins."""
    second = of_stage(1, ("F", 2.25, 3), ("B", 3, 4), ("optimizer", 8, 11))
    rows = [
        of_stage(0, ("F", 0, 2), ("B", 4, 6), ("optimizer", 7, 8)), second,
        of_stage(0, ("F", 0, 1), ("B", 4, 5), ("optimizer", 7, 8)), second,
    ]  # fmt: skip
    folder = write_run(tmp_path, "3d4", rows, dp=2, pp=2, schedule="1f1b")
    work = compare_step(Run(folder)).work
    found = work.transfer(Action(Kind.FORWARD, 0, 0)), work.exchange(0), work.update(0)
    assert found == (0.125, 1, 2)


def test_of_several_steps_the_usual_one_is_shown_and_medians_are_of_all(tmp_path: Path) -> None:
    """The second of three took as long as the median of all steps, which the summary has."""
    one, slow, usual = (
        [[(*event[:3], k * event[3], k * event[4]) for event in row] for row in PIPELINE]
        for k in (1, 4, 2)
    )
    about: dict[str, Any] = {"schedule": "gpipe", "num_microbatches": 2, "pp": 2}
    seconds = [900.0, 9.5, 20.0, 38.0]
    folder = write_run(
        tmp_path, "pipeline2", one, usual, slow, stage_sizes=[5, 3], step_seconds=seconds, **about
    )
    found = compare_step(Run(folder))
    assert (found.step, found.span) == (2, 19)
    assert found.work.seconds(Action(Kind.FORWARD, 0, 0)) == 2
    assert found.rank_times().forward == [2, 2]
    (folder / "summary.json").unlink()  # a run that did not finish: the median of what it recorded
    (folder / "options.json").write_text(json.dumps({"world_size": 2, **about}))
    assert compare_step(Run(folder)).step == 2


def test_time_is_counted_once_whatever_lies_inside_another(tmp_path: Path) -> None:
    """Of two chunks per rank, whose backwards compute again inside and beside themselves: the step
    as the simulator has it. Nobody is idle where any event is going on."""
    work = Work(with_times([1, 2, 1, 1], [1] * 4, [1] * 4))
    step = Simulator(find("interleaved", 2)(2, 2)).run(work)
    plain = [[(*e[:3], e.start, e.end) for e in row] for row in in_order(events_of(step))]
    nested = [
        [*row, *(("R", s, i, start, (start + end) / 2) for kind, s, i, start, end in row
                 if kind == "B")]
        for row in plain
    ]  # fmt: skip
    # A second part of a layer's backward, within the first; and one that outlasts it.
    split = [
        [event for kind, s, i, start, end in row for event in (
            [(kind, s, i, start, end)] if kind != "B" else
            [("B", s, i, start, end - 0.5), ("B", s, i, start + 0.2, start + 0.4),
             ("B", s, i, start + 0.5, end)]
        )]
        for row in plain
    ]  # fmt: skip
    for k, rows in enumerate((plain, nested, split)):
        about = {"schedule": "interleaved", "chunks": 2, "num_microbatches": 2, "pp": 2}
        found = compare_step(Run(write_run(tmp_path, f"chunks{k}_2", rows, **about)))
        assert found.span == step.span
        assert found.bubble == pytest.approx(step.bubble)
        assert found.predicted.seconds == pytest.approx(step.seconds)
        assert found.rank_times().forward == [2, 3]
        assert found.rank_times().backward_input == [2, 2]
        assert [found.work.recompute(s) for s in range(4)] == [0] * 4
        idle = [sum(causes.values()) for causes in found.idle.values()]
        assert sum(idle) / 2 == pytest.approx(step.bubble * step.span)
        assert all(causes["not predicted"] < 1e-9 for causes in found.idle.values())
        parts = shares(found.events)
        assert sum(parts.values()) == pytest.approx(step.span)
        assert parts["idle"] == pytest.approx(step.bubble * step.span)
        assert parts["recompute"] == pytest.approx(4 if k == 1 else 0)


def in_order(workers: Workers) -> list[Sequence[Event]]:
    """The actions of each rank."""
    return [actions for _, actions in sorted(actions_of(workers).items())]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of `make report`."""
    return tmp_path_factory.mktemp("course")


@pytest.fixture
def course(root: Path, ranks: Ranks) -> Path:
    """The runs of `make report`, tiny, and its page; the folder. They are made once."""
    if (root / "report.html").is_file():
        return root
    made = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed", "report", f"REPORT={root}", "N_EPOCHS=2"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for line in made.stdout.replace("\\\n", " ").splitlines():
        enter, _, command = line.rpartition(" && ")
        _, path, *words = shlex.split(command)
        program, folder = Path(path).stem, Path(enter.removeprefix("cd ") or root)
        if program == "report":
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(ROOT)
                report.main(words)
        if not program.startswith("run_"):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        tiny = f"{TINY} --keep 0 --batch_size 16 --model_max_length 32"
        command = f"{program} {shlex.join(words)} {tiny} --workdir {folder / words[-1]}"
        here, both = partial(in_folder, folder), "--world_size 2" in line
        found = ranks.run(on_rank, command, here) if both else [on_rank(0, 1, command, here)]
        assert [error for _, error in found] == [None] * len(found)
    return root


def test_the_page_of_a_course(course: Path) -> None:
    page = (course / "report.html").read_text("utf-8")
    links = re.findall(r'\b(?:src|href)\s*=\s*"([^"]{,10})', page)
    assert {link[0] for link in links} == {"#"}  # nothing from elsewhere
    names = re.findall(r'\bid="([^"]*)', page)
    assert len(names) == len({*names})  # those of figures, too
    text = text_of(page)
    for question in re.findall(r"<tr><td>(.*?\?)</td>", (PAGE / "cmu_11868.html").read_text()):
        assert question in text
    assert "(n-1)/(m+n-1) = 11.1% for n = 2, m = 8" in text
    assert "Do all ranks have the same gradients? Yes, to the last bit" in text
    times = [
        json.loads((course / name).read_text())["training_time"]
        for name in ("mp/eval_results_epoch1.json", "pp/eval_results_epoch1.json")
    ]
    assert f"one stage at a time? {times[0] / times[1]:.2f}x by the time of an epoch" in text


def test_a_rank_with_another_gradient_is_found(course: Path, tmp_path: Path) -> None:
    shutil.copytree(course / "gradients2", tmp_path / "wrong")
    path = tmp_path / "wrong" / "tests" / "model1_gradients.pth"
    gradients = torch.load(path, weights_only=True)
    gradients["transformer.h.1.ln_1.bias"][3] += 0.5
    torch.save(gradients, path)
    shutil.copy(path.with_name("model0_gradients.pth"), path.with_name("model2_gradients.pth"))
    runs = report.reported([course / "gradients1", tmp_path / "wrong"])
    first, second = report.gradients(runs)
    assert first["between"] == 0 and first["apart"] == 0
    assert second["between"] == pytest.approx(0.5) and second["apart"] < 1e-6
    assert (first["ranks"], second["ranks"]) == (1, 3)


def test_a_run_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(staged(tmp_path))])
    assert capsys.readouterr().out == f"The page is {tmp_path}/pipeline2/report.html.\n"
    page = (tmp_path / "pipeline2" / "report.html").read_text("utf-8")
    assert len(page) < 150_000
    text = text_of(page)
    for said in (
        "A step takes 3000.0 ms , the median of all but the first. Of the recorded steps, step 2 "
        "is nearest to it: 10000.0 ms, 9500.0 of them from the first action to the last; ranks "
        "were idle for 36.8% of these. Predicted from the median of each kind and stage: 10000.0 "
        "ms, 9500.0 of them from the first action to the last; ranks are idle for 36.8% of these.",
        "Weights agree with one process. Worst: h.0.bias , off by 3.0e-07 where rounding explains",
        "pipeline2 3 0.5000 1.50 7.25 bleu",
        "fill transfer not predicted rank 0 3000.0 500.0 0.0 rank 1 2777.8 472.2 250.0",
        "rank 0, 2000.0 to 5500.0 ms, before B0 of stage 0, which needs B0 of stage 1: fill "
        "3000.0 ms, transfer 500.0 ms",
        "rank 1, 7500.0 to 9500.0 ms, at the end: fill ",
        "Take this step apart : more micro-batches, a different schedule, an action in a different "
        "place.",
        "rank 0 38.1 38.1 76.3 668",
    ):
        assert said in text


def test_what_the_planner_predicts(course: Path) -> None:
    runs = report.reported([course / "pp"], machine("a100-80gb"))
    (planned,) = [run.priced for run in runs]
    assert planned is not None and planned.layout.pp == 2 and planned.layout.micro_batch == 2
    text = text_of(report.render(runs, PAGE / "report.html"))
    error = 100 * (planned.seconds / runs[0].seconds - 1)
    assert f"{1e3 * planned.seconds:.1f} {error:+.0f} %" in text
    assert "Predicted by the planner: " in text and "the limit is 81,203" in text


def test_a_run_as_the_planner_sees_it(tmp_path: Path) -> None:
    """5 examples of a replica are 3 micro-batches of 2 at most, and 120 positions of 10 examples
    sequences of 12. Its 8 ranks share 4 cores; two neighbours have parts of a stage's matrices."""
    about: dict[str, Any] = {
        "batch_size": 10, "dp": 2, "pp": 2, "tp": 2, "num_microbatches": 3, "schedule": "1f1b",
        "chunks": 2, "precision": "bf16", "recompute": "sqrt", "loss": [4.0, 1.0],
    }  # fmt: skip
    four_cores = replace(machine("a100-80gb"), gpus_per_node=4)
    (run,) = report.reported([of_gpt2(tmp_path, "3d8", **about)], four_cores)
    priced = run.priced
    assert priced is not None
    layout = priced.layout
    assert (priced.model.seq, layout.micro_batch, layout.num_microbatches) == (12, 2, 3)
    assert (layout.chunks, layout.precision, layout.recompute) == (None, "bf16", "always")
    assert priced.machine.tflops["bf16"] == four_cores.tflops["bf16"] / 2
    assert priced.machine.link_us == 2 * four_cores.link_us
    assert four_cores.shared(2) == four_cores
    first, last = map(sum, priced.memory)
    assert run.planned_memory() == 2 * [first, first, last, last] and first != last
    assert run.memory == 700_000_007 / 2**30
    threads = replace(run, folder=of_gpt2(tmp_path, "pipeline1", num_devices=2, **about))
    assert threads.priced is not None and threads.planned_memory() == []
    parts = about | {"dp": 4, "cp": 2, "pp": 1, "tp": 1, "ep": 2, "experts": 4, "top_k": 2}
    cut = replace(run, folder=of_gpt2(tmp_path, "3d9", **parts, attention="heads"))
    assert cut.priced is not None
    layout, model = cut.priced.layout, cut.priced.model
    assert (layout.dp, layout.cp, layout.ep, layout.attention) == (4, 2, 2, "heads")
    assert (model.experts, model.top_k) == (4, 2)
    for shards, strategy in ((None, "fsdp4"), (2, "fsdp4")):  # all ranks share a copy, or two do
        one = about | {"dp": 4, "pp": 1, "tp": 1, "zero": 3, "shards": shards, "schedule": None}
        sharded = replace(run, folder=of_gpt2(tmp_path, strategy, **one))
        assert sharded.priced is not None
        layout = sharded.priced.layout
        assert (layout.gpus, layout.dp, layout.shards) == (4, 4, shards)
    other = replace(run, folder=write_run(tmp_path, "ddp1", **about | {"loss": [4.2, 1.1]}))
    assert (report.apart(run, run), report.apart(other, run)) == ("", "1.0e-01")


def test_a_step_to_take_apart_begins_as_the_run_did(tmp_path: Path) -> None:
    """With its chunks, and with its micro-batches, however many."""
    schedule = find("interleaved", 5)(2, 14)
    recorded = events_of(Simulator(schedule).run(Work(lambda _: 1.0)))
    rows = [[event[:5] for event in events] for events in recorded.values()]
    folder = write_run(tmp_path, "pipeline2", rows, schedule="interleaved", loss=[1.0], pp=2)
    (run,) = report.reported([folder])
    assert run.start is not None
    assert run.start["times"] == {
        "F": [5000.0, 5000.0], "I": [2500.0, 2500.0], "W": [2500.0, 2500.0], "R": [0.0, 0.0]
    }  # fmt: skip
    catalogue = stepper([run.start])["catalogue"]
    assert catalogue["microbatches"] == [*range(1, 9), 10, 12, 14, 16]
    assert catalogue["lists"]["interleaved"][5][2][14] == letters(schedule)


def test_shapes_and_speeds_of_runs(tmp_path: Path) -> None:
    """Eight ranks are 2 x 4 x 1. Twice the examples in the same time are twice as fast. Folders of
    one name are told apart by their paths, and one that is named twice is one run."""
    steps: dict[str, Any] = {"step_seconds": [9.0, 2.0, 2.0], "loss": [2.0, 1.0, 1.0], "load": 0.0}
    one = write_run(tmp_path, "a/run1", batch_size=12, **steps)
    cut = write_run(tmp_path, "b/run8", batch_size=24, dp=2, pp=4, tp=1, **steps)
    other = write_run(tmp_path, "c/run1", batch_size=6, **steps)
    runs = report.reported([one, cut, one])
    shapes = [(run.name, *run.shape.values()) for run in runs]
    assert shapes == [("run1", 1, 1, 1, 1, 1, 1), ("run8", 2, 1, 1, 1, 4, 1)]
    text = text_of(report.render(runs, PAGE / "report.html"))
    assert "run1 1x1x1 12 2000.0 1.00x" in text and "run8 2x4x1 24 2000.0 2.00x" in text
    page = report.render(report.reported([one, other]), PAGE / "report.html")
    assert f"{other} 1x1x1 6 2000.0 0.50x" in text_of(page)
    for absent in ("planner", "idle", "validation", "Gradients", "<form"):
        assert absent not in page.partition("<body>")[2].partition("<script>")[0]


def test_a_course_of_one_epoch_has_its_page(course: Path, tmp_path: Path) -> None:
    for name in ("dp1", "dp2", "mp", "pp", "gradients1", "gradients2"):
        shutil.copytree(course / name, tmp_path / name)
    for path in tmp_path.glob("*/*epoch1.json"):
        path.unlink()
    page = report.render(report.reported(sorted(tmp_path.iterdir())), PAGE / "cmu_11868.html")
    assert "over the only epoch; a first epoch is slower than later ones." in text_of(page)


def test_what_has_not_finished_is_refused(tmp_path: Path) -> None:
    """No run, and one that was killed and left its options."""
    (tmp_path / "options.json").write_text('{"command": "python x.py", "batch_size": 8}')
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path, tmp_path / "empty"):
        said = rf"{folder} has no summary.json; name the --workdir of a finished run"
        with pytest.raises(UserError, match=said):
            report.main([str(folder)])


def test_a_template_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spoilt.html").write_text("{% for run in runs %}")
    for name, said in (("none", "'none.html' not found"), ("spoilt", "Unexpected end of template")):
        template = tmp_path / f"{name}.html"
        with pytest.raises(UserError, match=f"--template {template}: {said}"):
            fill_template(template, runs=[])


def test_a_browser_takes_the_step_of_a_run_apart(tmp_path: Path) -> None:
    """As it ran; then under the schedule of the URL, with four micro-batches of half the time, and
    a last rank that takes twice as long; and back, by a link."""
    summary = json.loads((staged(tmp_path) / "summary.json").read_text())
    folders = [tmp_path / "pipeline2", write_run(tmp_path, "other2", PIPELINE, **summary)]
    report.main([*map(str, folders), "--output", str(tmp_path / "page.html")])
    as_it_ran = Work(with_times([1, 1], [1, 1], [1, 1]), lambda _: 0.25)
    slower = replace(as_it_ran, seconds=with_times([0.5, 1], [0.5, 1], [0.5, 1]))
    with browser(tmp_path / "browser", "the page of a run") as window:
        for place, name, m, work in (
            ("#start=pipeline2", "gpipe", 2, as_it_ran),
            ("#schedule=zb&m=4&last=2&start=other2", "zb", 4, slower),
        ):
            window.open(tmp_path / "page.html", place)
            step = Simulator(find(name)(2, m)).run(work)
            said = f"{name}, 2 ranks, {m} micro-batches: a step takes {1e3 * step.span:g} ms, and "
            said += f"ranks are idle {100 * step.bubble:.1f} % of it."
            assert window.text("#result") == said
            assert window.js("location.hash") == place
        window.click('a[href="#start=pipeline2"]')
        window.until("location.hash === '#start=pipeline2'")
        said = (
            "Step 2 of this run took 9500.0 ms from the first action to the last, and ranks were "
        )
        assert window.text("#task") == f"{said}idle 36.8% of it."
        assert window.errors == []


@pytest.mark.parametrize("name", ["a100-80gb", "h100", "v100", "t4", "b200"])
def test_runs_of_every_precision_are_predicted(name: str, tmp_path: Path) -> None:
    """That train.py has, on every machine, but for bf16 where the hardware has none: a sentence."""
    where = machine(name)
    for precision in get_args(get_type_hints(Options)["precision"]):
        folder = of_gpt2(tmp_path, f"{precision}_1", precision=precision, loss=[4.0, 1.0])
        (run,) = report.reported([folder], where)
        if precision in where.tflops or precision == "tf32":
            assert run.priced is not None and run.priced.seconds > 0
            assert run.priced.layout.precision == precision
        else:
            said = rf"/{folder.name} on --machine {name}: --precision bf16: .* fp32 or fp16 works"
            with pytest.raises(UserError, match=said):
                _ = run.priced
