"""The page of runs: what it says is what their files hold, and its sliders simulate what Python
does. A real browser opens it, where there is one."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.schedules.catalogue import find
from pipeline.schedules.schedule import Kind
from planning.describe import machine
from planning.simulate import Simulator, Work, with_times
from project import report
from project.figures.compared import compare, compare_step
from project.figures.gantt import events_of
from project.figures.runs import Run
from tests.project.conftest import Refusal
from tests.project.made_up import PIPELINE, write_run
from tests.project.programs import ROOT, TINY, in_folder, on_rank
from tests.ranks import Ranks
from tests.which import program
from training.launch.errors import UserError
from training.timeline import Event

PAGE = ROOT / "project" / "page"


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


def test_a_step_beside_its_prediction(tmp_path: Path) -> None:
    """A message takes the median of 0.5 and 0 s, so that stage 1 is predicted to begin at 1.25."""
    found = compare_step(Run(staged(tmp_path)))
    assert found.seconds.transfer == 0.25
    assert found.seconds.actions == {
        Kind.FORWARD: [1, 1], Kind.BACKWARD: [2, 2],
        Kind.BACKWARD_INPUT: [0, 0], Kind.BACKWARD_WEIGHT: [0, 0],
    }  # fmt: skip
    assert [(str(t.action), t.start, t.end) for t in found.predicted.rows[1]] == [
        ("F0", 1.25, 2.25), ("F1", 2.25, 3.25), ("B0", 3.25, 5.25), ("B1", 5.25, 7.25),
    ]  # fmt: skip
    gaps: list[Any] = [
        (name, str(gap.before), str(gap.waits_for), gap.causes)
        for name, of_worker in found.waits.items()
        for gap in of_worker
    ]
    assert gaps == [
        ("rank 0", "B0", "B0", pytest.approx({"fill": 3, "transfer": 0.5})),
        ("rank 0", "None", "None", pytest.approx({"other": 0.5})),
        ("rank 1", "F0", "F0", pytest.approx({"fill": 1, "transfer": 0.25, "other": 0.25})),
        ("rank 1", "None", "None", pytest.approx({"fill": 16 / 9, "transfer": 2 / 9})),
    ]  # fmt: skip
    assert found.idle["rank 0"]["fill"] == 3
    assert found.bubble == pytest.approx(1 - (6 + 6) / (2 * 9.5))
    # The ideal has neither messages nor uneven stages: 6 of 9 busy, (n-1)/(m+n-1) idle.
    ideal = found.predicted.equal()
    assert [ideal.seconds, ideal.bubble] == pytest.approx([9, 1 / 3])
    # Beside another prediction, in which all takes twice as long.
    slow = Work(with_times([2, 2], [2, 2], [2, 2]))
    assert compare_step(Run(tmp_path / "pipeline2"), slow).predicted.equal().seconds == 18


def test_what_recomputation_takes() -> None:
    """Outside its backward it is on its own; within, a part of it. Two chunks of a rank: a V."""

    def row(*events: tuple[str, float, float], stage: int = 0) -> list[Event]:
        return [Event(kind, stage, 0, start, end) for kind, start, end in events]

    last = row(("F", 0, 1), ("R", 1, 2), ("I", 2, 3), ("W", 3, 4), stage=1)
    for backward, alone in (
        ([("R", 1, 2), ("B", 2, 4)], 1), ([("R", 1, 2), ("B", 1, 4)], 0), ([("B", 1, 4)], 0)
    ):  # fmt: skip
        found = compare({"rank 0": row(("F", 0, 1), *backward), "rank 1": last}, "1f1b", [0, 1])
        assert found.seconds.recompute == [alone, 1]
        assert found.seconds.actions[Kind.BACKWARD] == [3 - alone, 0]
    parts = [row(("F", k, k + 1), ("I", k + 1, k + 2), ("W", k + 2, k + 3), stage=s)
             for s, k in enumerate(range(0, 36, 9))]  # fmt: skip
    workers = {"rank 0": parts[0] + parts[3], "rank 1": parts[1] + parts[2]}
    ideal = compare(workers, "zbv", [0, 1]).predicted.equal()
    assert [(str(t.action), t.action.stage, t.start) for t in ideal.rows[0]] == [
        ("F0", 0, 0), ("F0", 3, 3), ("I0", 3, 4), ("W0", 3, 5), ("I0", 0, 7), ("W0", 0, 8)
    ]  # fmt: skip


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
    gradients["transformer.h.1.ln_1.bias"] = torch.zeros(7)
    torch.save(gradients, path)
    with pytest.raises(
        UserError, match=r"model1_gradients.pth: its gradients are of another model"
    ):
        report.gradients(runs)


def test_a_run_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(staged(tmp_path))])
    assert capsys.readouterr().out == f"The page is {tmp_path}/pipeline2/report.html.\n"
    page = (tmp_path / "pipeline2" / "report.html").read_text("utf-8")
    assert len(page) < 100_000
    text = text_of(page)
    for said in (
        "A step takes 3000.0 ms , the median of all but the first; step 2 took 10000.0 ms, 36.8% "
        "idle. Predicted from the median of each kind and stage: 10000.0 ms, 36.8% idle.",
        "Weights agree with one process. Worst: h.0.bias , off by 3.0e-07 where rounding explains",
        "pipeline2 3 0.5000 1.50 7.25 bleu",
        "fill transfer other rank 0 3000.0 500.0 500.0",
        "rank 0, 2000.0 to 5500.0 ms, before B0 of stage 0, which needs B0 of stage 1: 3000.0 ms",
        "With scripts, sliders here simulate the step",
        "rank 0 40.0 40.0 80.0 700",
    ):
        assert said in text


def test_what_the_planner_predicts(course: Path) -> None:
    runs = report.reported([course / "pp"], machine("a100-80gb"))
    (planned,) = [run.priced for run in runs]
    assert planned is not None and planned.layout.pp == 2 and planned.layout.micro_batch == 2
    text = text_of(report.render(runs, PAGE / "report.html"))
    error = 100 * (planned.seconds / runs[0].seconds - 1)
    assert f"{1e3 * planned.seconds:.1f} {error:+.0f} %" in text
    assert "Predicted by the planner: " in text and "the limit is 79.3 GiB" in text
    poorer = replace(machine("a100-80gb"), tflops={"bf16": 312})
    with pytest.raises(UserError, match=r"pp on --machine a100-80gb: --precision fp32: "):
        report.render(report.reported([course / "pp"], poorer), PAGE / "report.html")


def test_a_run_as_the_planner_sees_it(tmp_path: Path) -> None:
    """5 examples of a replica are 3 micro-batches of 2 at most, and 120 positions of 10 examples
    sequences of 12. Its 8 ranks share 4 cores; two neighbours have parts of a stage's matrices."""
    about: dict[str, Any] = {
        "batch_size": 10, "dp": 2, "pp": 2, "tp": 2, "num_microbatches": 3, "schedule": "1f1b",
        "chunks": 2, "precision": "bf16", "recompute": "sqrt", "loss": [4.0, 1.0],
    }  # fmt: skip
    folder = write_run(tmp_path, "3d8", **about)
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 128}
    (folder / "config.json").write_text(json.dumps(sizes))
    four_cores = replace(machine("a100-80gb"), gpus_per_node=4)
    (run,) = report.reported([folder], four_cores)
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
    threads = replace(run, folder=write_run(tmp_path, "pipeline1", num_devices=2, **about))
    (threads.folder / "config.json").write_text(json.dumps(sizes))
    assert threads.priced is not None and threads.planned_memory() == []
    parts = about | {"dp": 4, "cp": 2, "pp": 1, "tp": 1, "ep": 2, "experts": 4, "top_k": 2}
    cut = replace(run, folder=write_run(tmp_path, "3d9", **parts, attention="heads"))
    (cut.folder / "config.json").write_text(json.dumps(sizes))
    assert cut.priced is not None
    layout, model = cut.priced.layout, cut.priced.model
    assert (layout.dp, layout.cp, layout.ep, layout.attention) == (4, 2, 2, "heads")
    assert (model.experts, model.top_k) == (4, 2)
    other = replace(run, folder=write_run(tmp_path, "ddp1", **about | {"loss": [4.2, 1.1]}))
    assert (report.apart(run, run), report.apart(other, run)) == ("", "1.0e-01")


def test_the_run_itself_is_among_what_sliders_choose(tmp_path: Path) -> None:
    """With its chunks, and with its micro-batches, however many."""
    schedule = find("interleaved", 3)(2, 14)
    recorded = events_of(Simulator(schedule).run(Work(lambda _: 1.0)))
    rows = [[event[:5] for event in events] for events in recorded.values()]
    sizes = {"stage_sizes": [1] * 6, "loss": [1.0], "pp": 2}
    folder = write_run(tmp_path, "pipeline2", rows, schedule="interleaved", **sizes)
    (run,) = report.reported([folder])
    sliders = run.sliders()
    assert sliders is not None and sliders["sizes"] == [*range(2, 15, 2)]
    assert sliders["lists"]["interleaved"][14] == schedule


def test_what_replicas_take() -> None:
    """A message is sent when the last replica has what it adds to, and gradients are exchanged
    until the first update begins."""

    def row(stage: int, *events: tuple[str, float, float]) -> list[Event]:
        return [Event(kind, stage, 0, start, end) for kind, start, end in events]

    workers = {
        "rank 0": row(0, ("F", 0, 2), ("B", 4, 6), ("optimizer", 7, 8)),
        "rank 1": row(1, ("F", 2.25, 3), ("B", 3, 4), ("optimizer", 8, 11)),
        "rank 2": row(0, ("F", 0, 1), ("B", 4, 5), ("optimizer", 7, 8)),
        "rank 3": row(1, ("F", 2.25, 3), ("B", 3, 4), ("optimizer", 8, 11)),
    }
    found = compare(workers, "1f1b", [0, 1, 0, 1]).seconds
    assert (found.transfer, found.exchange, found.update) == (0.125, 1, 2)


def test_shapes_and_speeds_of_runs(tmp_path: Path) -> None:
    """Eight ranks are 2 x 4 x 1. Twice the examples in the same time are twice as fast. Folders of
    one name are told apart by their paths, and one that is named twice is one run."""
    steps: dict[str, Any] = {"step_seconds": [9.0, 2.0, 2.0], "loss": [2.0, 1.0, 1.0], "load": 0.0}
    one = write_run(tmp_path, "a/run1", batch_size=12, **steps)
    cut = write_run(tmp_path, "b/run8", batch_size=24, dp=2, pp=4, tp=1, **steps)
    other = write_run(tmp_path, "c/run1", batch_size=6, **steps)
    runs = report.reported([one, cut, one])
    shapes = [(run.name, *run.shape.values()) for run in runs]
    assert shapes == [("run1", 1, 1, 1, 1, 1), ("run8", 2, 1, 1, 4, 1)]
    text = text_of(report.render(runs, PAGE / "report.html"))
    assert "run1 1x1x1 12 2000.0 1.00x" in text and "run8 2x4x1 24 2000.0 2.00x" in text
    page = report.render(report.reported([one, other]), PAGE / "report.html")
    assert f"{other} 1x1x1 6 2000.0 0.50x" in text_of(page)
    for absent in ("planner", "idle", "validation", "Gradients", 'what-if" auto'):
        assert absent not in page.partition("<body>")[2].partition("<script>")[0]


def test_a_course_of_one_epoch_has_its_page(course: Path, tmp_path: Path) -> None:
    for name in ("dp1", "dp2", "mp", "pp", "gradients1", "gradients2"):
        shutil.copytree(course / name, tmp_path / name)
    for path in tmp_path.glob("*/*epoch1.json"):
        path.unlink()
    page = report.render(report.reported(sorted(tmp_path.iterdir())), PAGE / "cmu_11868.html")
    assert "Times are means over one epoch, which is slower than those after it." in text_of(page)


def test_what_is_no_run_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "empty").mkdir()
    said = refusal(report.main, [str(tmp_path / "empty"), "--template", "none.html"])
    assert "--template none.html: there is no such file; it may be" in said
    with pytest.raises(UserError, match=r"empty: it has no summary.json; name the --workdir of"):
        report.main([str(tmp_path / "empty")])


def test_a_run_that_was_interrupted_says_what_it_measured(tmp_path: Path) -> None:
    """Before its first epoch it leaves its options and the lines of its steps, or none."""
    folder, none = tmp_path / "killed", tmp_path / "none"
    for path in (folder, none):
        path.mkdir()
        (path / "options.json").write_text('{"command": "python x.py", "batch_size": 8}')
    steps = [{"loss": 4 - k, "seconds": s, "tokens_per_sec": 60} for k, s in enumerate((9, 2, 2.5))]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    text = text_of(report.render(report.reported([folder, none]), PAGE / "report.html"))
    said = (
        "it has done 3 steps ; a step takes 2250.0 ms , the median of all but the first; "
        "the last training loss is 2.0000"
    )
    assert said in text and "it ended before its first step" in text


def test_a_browser_simulates_the_step_again(tmp_path: Path) -> None:
    """Four micro-batches of half the time, one of five layers moved from stage 0 to stage 1, under
    the schedule of the URL; then a reader takes another."""
    browser = program("chromium", "google-chrome", tests="the page in a browser")
    report.main([str(staged(tmp_path)), "--output", str(tmp_path / "page.html")])
    with (tmp_path / "page.html").open("a") as page:
        page.write("""<script>
          const form = document.querySelector("form.what-if"), { said, schedule } = form.elements;
          const found = [said.value];
          schedule.value = "gpipe";
          schedule.dispatchEvent(new Event("input", { bubbles: true }));
          document.title = [...found, said.value, location.hash].join("|");
        </script>""")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    address = f"file://{tmp_path}/page.html#0.m=4&0.schedule=zb&0.move=1"
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path}", address],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    own = compare_step(Run(tmp_path / "pipeline2"))
    predicted = f"{1e3 * own.predicted.seconds:.1f} ms, {100 * own.predicted.bubble:.1f} % bubble"
    as_it_ran = f"As it ran: simulated {predicted}, measured 10000.0 ms, 36.8 % bubble."
    moved = with_times([0.4, 0.6], [0.4, 0.6], [0.4, 0.6])
    work = Work(moved, lambda _: 0.25, update=lambda _: 0.5)
    expected = []
    for name in ("zb", "gpipe"):
        step = Simulator(find(name)(2, 4)).run(work)
        numbers = f"{1e3 * step.seconds:.1f} ms, {100 * step.bubble:.1f} % bubble. {as_it_ran}"
        chosen = f"{name}, 4 micro-batches, one layer moved from rank 0 to rank 1"
        expected.append(f"{chosen}: {numbers}")
    (title,) = re.findall("<title>(.*?)</title>", done.stdout)[:1]
    # The run's own schedule is no choice, and not in the URL.
    assert html.unescape(title).split("|") == [*expected, "#0.m=4&0.move=1"]
    _, _, form = done.stdout.partition('<form class="what-if"')
    drawn = re.findall("<svg.*?</svg>", form, re.DOTALL)[0]
    actions = sum(map(len, find("gpipe")(2, 4)))
    assert drawn.count("<rect") == actions + 2  # and two optimizers
