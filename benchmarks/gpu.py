"""What only a GPU can show, in one command and under eight minutes: make gpu.

    checks    every program, and tests of pipelines, on the real device
    verify    rows of tests/equivalence: every kind of layout against one plain process
    races     the same forward and backward 50 times, bit for bit
    waits     how often the host waits for the GPU in a step
    memory    of each ZeRO stage, two ranks
    speed     GPT-2 small in bf16, beside the plain Hugging Face loop and DistributedDataParallel

    python -m benchmarks.gpu                  all of them, a table, and benchmarks/results/gpu.json
    python -m benchmarks.gpu races speed      some of them

With two GPUs ranks exchange over NCCL. Ranks that share a GPU exchange over gloo. Without a GPU
all of it runs on a device without hardware (tests/device), which has neither times nor memory: a
shorter list of rows, and no speed. The exit status is 1 if a check fails; a missed goal is only
reported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from benchmarks.harness import RESULTS, alternate, ratio_of, summarize
from project.train import parse_train, read_texts
from tests.device import NUMBER, environment
from tests.device.guard import missing
from tests.device.seen import watch
from tests.equivalence.compare import Result, laid_out
from tests.equivalence.run import check_all
from tests.equivalence.table import find, sharded
from training.launch.errors import counted
from training.launch.launch import launch
from training.launch.meeting import setup
from training.launch.world import World
from training.layouts.layout import Setup, parameters_of, setup_of
from training.layouts.replicated import Replicated
from training.optimization import Counts, Optimizers, Recipe
from training.options import Options
from training.tasks.language import LanguageTask

REAL = NUMBER not in os.environ  # else the device has no hardware
ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "training" / "tasks" / "corpus"
GIB = 2**30
SAME_STEPS = 50 if REAL else 2  # of `races`
GOAL = 1.3  # times the plain loop
LIMIT = 300.0  # seconds that a program may take; several start at once


@dataclass(frozen=True)
class Line:
    """A line of the table. `ok`: a check that held or failed; None: a number."""

    section: str
    name: str
    found: str
    ok: bool | None = None
    value: float | None = None
    spread: tuple[float, float] | None = None
    goal: float | None = None

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAILED", None: ""}[self.ok]
        if self.goal is not None and self.value is not None:
            verdict = f"goal {self.goal}: {'reached' if self.value >= self.goal else 'MISSED'}"
        return f"{self.section:8}{self.name:44}{self.found:50}{verdict}"


def gpus() -> int:
    """How many real ones."""
    return torch.cuda.device_count() if REAL else 0


def machine() -> list[Line]:
    """What this runs on."""
    found = [("torch", f"{torch.__version__}, Python {sys.version.split()[0]}")]
    for i in range(gpus()):
        about = torch.cuda.get_device_properties(i)
        found.append((f"cuda:{i}", f"{about.name}, {about.total_memory / GIB:.0f} GiB"))
    if not REAL:
        found.append(("devices", "two without hardware: no times, no memory"))
    elif dist.is_nccl_available():
        found.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
    return [Line("machine", name, text) for name, text in found]


# Checks


SMALL = "--model gpt2-mini --n_train 256 --n_validation 64 --n_test 16 --batch_size 32 --dropout 0"
EQUAL = f"{SMALL} --num_batches 4 --check_weights --check_output"
TESTED = ("tests/pipeline/test_pipe.py", "tests/pipeline/test_randomness.py")


def programs(n: int) -> list[list[str]]:
    """Command lines for n GPUs, in chains: each line needs what those before it have written."""
    several, heads = max(2, n), max(t for t in (1, 2, 4) if t <= n)  # gpt2-mini has four
    return [
        [f"run_data_parallel.py --world_size {several} {SMALL} --n_epochs 1 --workdir workdir",
         f"run_data_parallel.py --world_size {several} {SMALL} --n_epochs 2 --workdir workdir "
         "--resume",
         "generate.py workdir 'Der Mann' 'Wir sehen zwei'"],
        [f"run_pipeline.py --model_parallel_mode pipeline_parallel {SMALL} --n_epochs 1"],
        [f"train.py single {EQUAL} --precision tf32 --workdir single"],
        [f"train.py ddp --world_size {several} {EQUAL} --workdir ddp"],
        [f"train.py fsdp --world_size {n} {EQUAL} --workdir fsdp"],
        [f"train.py pipeline --world_size {n} {EQUAL} --schedule zb --workdir pipeline"],
        [f"train.py tensor --world_size {heads} {EQUAL} --workdir tensor"],
        ["train.py single --vgg_width 16 --n_train 256 --n_validation 64 --num_batches 4"],
    ]  # fmt: skip


def checks() -> list[Line]:
    """Programs, with evaluation, translation, checkpoint and resume, or compared with one process
    weight by weight; and those tests that take what devices there are."""
    if not REAL:
        return [Line("checks", "programs", "on the device without hardware: make test")]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as some:
        found = [
            line
            for of_chain in some.map(partial(_ran, folder=Path(folder)), programs(gpus()))
            for line in of_chain
        ]
    failure = _ended([sys.executable, "-m", "pytest", "-q", "-x", *TESTED], ROOT)
    return [*found, Line("checks", f"pytest {' '.join(TESTED)}", failure or "pass", not failure)]


def _ran(chain: list[str], folder: Path) -> list[Line]:
    lines = []
    for words in map(shlex.split, chain):
        command = [sys.executable, str(ROOT / "project" / words[0]), *words[1:]]
        failure = _ended([*command, "--device", "cuda"], folder)
        lines.append(Line("checks", " ".join(words[:4]), failure or "ended well", not failure))
    return lines


def _ended(command: list[str], folder: Path) -> str:
    """Empty if the command ends with status 0 in time; else why not, or its last line. All that it
    has said is printed then."""
    shown = {**os.environ, "TESTS_SEE_GPUS": "1"}  # the GPUs: see tests/conftest.py
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, cwd=folder, env=shown
        )
    except subprocess.TimeoutExpired as late:  # its ranks end with it
        print(*(said.decode() for said in (late.stdout, late.stderr) if said), sep="\n", flush=True)
        return f"had not ended after {LIMIT:g} s"
    if done.returncode == 0:
        return ""
    print(done.stdout[-2000:], done.stderr[-3000:], sep="\n", flush=True)
    return f"status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"


VERIFIED = (
    "single-one_more", "single-twice", "single-recompute_always",
    "threads2-gpipe-m3", "threads2-1f1b-m8", "threads2-zb-clipped", "threads2-interleaved-v2_m3",
    "threads3-1f1b-twice", "module2-gpt2", "module2-vgg16", "blocks2-split_size3",
    "ddp2-per_parameter-one_more", "ddp2-overlap-one_more", "ddp2-gloo-twice",
    "fsdp2-zero1-clipped", "fsdp2-zero2-m2", "fsdp2-zero3-no_target", "fsdp2-zero3-twice",
    "fsdp2-zero3-recompute_always", "pipeline2-gpipe-m3", "pipeline2-zb-clipped",
    "pipeline2-zbv-v2_m8", "pipeline2-1f1b-twice", "mesh2-1x1x2", "mesh2-1x1x2-sequence",
    "mesh4-2x1x2-sequence-zero3", "mesh4-1x2x2-sequence", "mesh4-2x2x1-zero1",
)  # fmt: skip


def _show_failure(result: Result) -> None:
    if result.failure:
        print(f"    {result.name}: {result.failure}", flush=True)


def verify() -> list[Line]:
    """Losses, gradients and weights of four steps in float64, by parameter name. Ranks share the
    GPUs; stages in threads are on GPUs of their own where there are enough, else on the CPU."""
    rows = [find(name) for name in (VERIFIED if REAL else WITHOUT_HARDWARE)]
    if gpus() == 1:  # its batch is on the GPU, and stages that find none for each are not
        rows = [row for row in rows if not row.name.startswith("blocks2")]
    results = check_all(rows, 4, torch.float64, "cuda", _show_failure)
    agreed = [result for result in results if not result.failure]
    furthest = max(result.gradient.value for result in agreed) if agreed else math.inf
    text = f"{len(agreed)} of {len(rows)} agree; the furthest gradient by {furthest:.1e}"
    return [Line("verify", "rows, in float64", text, len(agreed) == len(rows))]


WITHOUT_HARDWARE = (
    "single-one_more", "ddp2-overlap-one_more", "fsdp2-zero3-one_more", "threads2-zb-clipped",
    "module2-gpt2", "pipeline2-1f1b-m8", "mesh2-1x1x2-sequence",
)  # fmt: skip


# Races

RACED = {
    1: ("single-dropout", "threads2-1f1b-m8", "threads2-zb-m8", "module2-gpt2"),
    2: ("ddp2-overlap-dropout", "fsdp2-zero3-dropout", "pipeline2-1f1b-dropout",
        "pipeline2-zb-dropout", "mesh2-1x1x2-sequence"),
}  # fmt: skip


def _same_bits(name: str, world: World) -> bool:
    """Whether SAME_STEPS backwards of one batch have the same loss and gradients, bit for bit. All
    ranks of the row call it together."""
    with laid_out(find(name), world, torch.float32) as training:
        model, average = training.model, getattr(training.model, "average_gradients", None)
        step = next(training._steps())
        first: list[Tensor] = []
        for _ in range(SAME_STEPS):
            torch.manual_seed(1)
            training.optimizer.zero_grad()
            loss = model.backward(step)
            if average is not None:
                average(model.module)
            now = [loss, *(p.grad for p in parameters_of(model.held) if p.grad is not None)]
            now = [t.detach().clone() for t in now]
            first = first or now
            if not all(torch.equal(a, b) for a, b in zip(first, now, strict=True)):
                return False
        return len(first) > 1


def _race_rank(world: World, folder: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in RACED[2]:
        same = _same_bits(name, world)
        (folder / f"{name}.{world.rank}").write_text(str(same))


def races() -> list[Line]:
    """Streams and threads must not show in a bit. Kernels that add atomically would: they are told
    to be deterministic."""
    found = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        world = World(device=torch.device("cuda", 0))
        for name in RACED[1]:
            found[name] = _same_bits(name, world)
    finally:
        torch.use_deterministic_algorithms(False)
    with tempfile.TemporaryDirectory() as folder:
        launch(_race_rank, Options(world_size=2, device="cuda"), Path(folder))
        for name in RACED[2]:
            verdicts = [(Path(folder) / f"{name}.{r}").read_text() for r in range(2)]
            found[name] = verdicts == ["True", "True"]
    text = f"{SAME_STEPS} backwards, the same bits"
    return [Line("races", name, text, same) for name, same in found.items()]


# Speed


class _Text:
    """GPT-2 on the built-in text, through the program's own options, task and layout."""

    def __init__(self, folder: Path, batch: int, length: int, *more: str) -> None:
        folder.mkdir(exist_ok=True)
        text = folder / "text.txt"
        if not text.exists():
            names = ("train.en", "train.de") if REAL else ("english.txt",)
            text.write_text("".join((CORPUS / name).read_text("utf-8") for name in names), "utf-8")
        options = [
            "single", "--dataset", str(text), "--batch_size", str(batch), "--model_max_length",
            str(length), "--padding", "max_length", "--workdir", str(folder), *more,
        ]  # fmt: skip
        self.args = parse_train(None, options)
        self.world = World(device=torch.device("cuda", 0))
        self.task = LanguageTask(self.args, self.world, read_texts(self.args, self.world), None)

    def plain_model(self) -> Any:
        """transformers' own, in training mode."""
        torch.manual_seed(0)
        return GPT2LMHeadModel(self.task.config).to(self.world.device).train()


class _Ours:
    """A step as training/loop.py takes it: data, backward, norm, update."""

    def __init__(self, text: _Text, **options: Any) -> None:
        args = replace(text.args, **options)
        self.text, self.number, self.setup = text, args.num_microbatches, setup_of(args, text.world)
        self.model = Replicated(text.task, text.world, self.setup)
        recipe = Recipe(args, text.task.steps_per_epoch)
        self.optimizer = Optimizers(self.model.optimizers, recipe, text.world)
        self.steps = self._steps()
        self.loss = math.nan

    def _steps(self) -> Iterator[Any]:
        for epoch in count():
            yield from full_steps(self.text, epoch, self.number)

    def step(self) -> None:
        step = next(self.steps)
        self.optimizer.zero_grad()
        loss = self.model.backward(step)
        self.optimizer.step(loss, step.count, Counts(step.positions, step.tokens))
        self.loss = self.optimizer.loss


def full_steps(text: _Text, epoch: int, num_microbatches: int | None) -> Iterator[Any]:
    """The steps of an epoch but the last, whose batch is smaller."""
    steps = text.task.steps(epoch, 0, 1, num_microbatches)
    return islice(steps, len(text.task.examples["train"]) // text.args.batch_size)


class _Plain:
    """The loop that a user of transformers writes; `wrap` puts the model into another."""

    def __init__(self, text: _Text, wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> None:
        self.device = text.world.device
        self.model = wrap(text.plain_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        ids = torch.randint(
            len(text.task.tokenizer), (4, text.args.batch_size, text.args.model_max_length)
        )
        self.batches = cycle(ids)
        self.loss = math.nan

    def step(self) -> None:
        ids = next(self.batches).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def _timed(step: Callable[[], None]) -> Callable[[], None]:
    def turn() -> None:
        step()
        torch.accelerator.synchronize()

    return turn


def speed() -> list[Line]:
    """Tokens per second of GPT-2 small in bf16 with dropout 0.1, in alternation."""
    if not REAL:
        return [Line("speed", "GPT-2 small, bf16", "skipped: no hardware")]
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    batch = 32 if memory > 60 else 8 if memory > 20 else 2
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        text = _Text(
            Path(folder),
            batch,
            1024,
            "--model",
            "gpt2",
            "--vocab_size",
            "50304",
            "--precision",
            "bf16",
            "--dropout",
            "0.1",
        )
        setup(0, 1, "nccl" if dist.is_nccl_available() else "gloo", port=0)
        try:
            wrap: Any = nn.parallel.DistributedDataParallel
            contestants: dict[str, Any] = {
                "transformers, a plain loop": _Plain(text),
                "DistributedDataParallel, one rank": _Plain(
                    text, lambda model: wrap(model, device_ids=[0])
                ),
                "this project": _Ours(text),
                "this project, --compile": _Ours(text, compile=True),
            }
            start = time.perf_counter()
            _timed(contestants["this project, --compile"].step)()
            compiled = time.perf_counter() - start
            for contestant in contestants.values():
                _timed(contestant.step)()
            seconds = alternate({n: _timed(c.step) for n, c in contestants.items()}, 12)
        finally:
            dist.destroy_process_group()
    plain = seconds["transformers, a plain loop"]
    for name, values in seconds.items():
        middle, (low, high) = summarize([batch * 1024 / s for s in values])
        ratio = ratio_of(plain, values)
        goal = GOAL if name.endswith("--compile") else None
        found = f"{middle:,.0f} tokens/s [{low:,.0f} .. {high:,.0f}], {ratio:.2f}x the loop"
        lines.append(Line("speed", name, found, None, ratio, (low, high), goal))
    lines.append(Line("speed", "first step with --compile", f"{compiled:.0f} s"))
    return lines


# Waits


@contextmanager
def _waits() -> Iterator[list[str]]:
    """Where the host has waited for the GPU inside: file and line."""
    found: list[str] = []
    if not REAL:
        with watch() as seen:
            yield found
        found += [Path(wait.where).name for wait in seen.waits]
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for w in caught:
        if "synchroniz" in str(w.message):
            found.append(f"{Path(w.filename).name}:{w.lineno}")


def waits() -> list[Line]:
    """Of a step of one process, with one micro-batch and with four. The plain loop has one, its
    loss.item(), and those inside transformers."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        small = () if REAL else ("--n_layer", "1", "--n_embd", "32", "--n_head", "2")
        text = _Text(Path(folder), 8, 128, "--model", "gpt2-mini", "--dropout", "0.1", *small)
        contestants: dict[str, Any] = {
            "transformers, a plain loop": _Plain(text),
            "one process": _Ours(text),
            "one process, 4 micro-batches": _Ours(text, num_microbatches=4),
        }
        for name, contestant in contestants.items():
            for _ in range(3):
                contestant.step()
            with _waits() as found:
                contestant.step()
            ok = len(found) == 1 if "process" in name else None
            where = ", ".join(sorted(set(found)))
            lines.append(Line("waits", name, f"{len(found)} per step: {where}", ok, len(found)))
    return lines


# Ranks


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-4, fused=True)


def _memory_rank(world: World, zero: int, folder: Path) -> None:
    """Three steps of GPT-2 small under a ZeRO stage: what is held between steps, and the peak."""
    torch.cuda.set_device(world.device)
    size = () if REAL else ("--n_layer", "1", "--n_embd", "32", "--n_head", "2")
    options = ("--model", "gpt2", "--precision", "bf16", "--dropout", "0", *size)
    text = _Text(folder / str(world.rank), 4, 256 if REAL else 32, *options)
    task, setup = text.task, Setup(replace(text.args, num_microbatches=1), _optimizer)
    task.device = world.device
    model: Any = (sharded(zero) if zero else Replicated)(task, world, setup)
    recipe = Recipe(text.args, task.steps_per_epoch)
    optimizer = Optimizers(model.optimizers, recipe, world, counted=model.counted)
    for step in islice(task.steps(0, world.rank, 2, 1), 3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss = model.backward(step)
        if not zero:
            model.average_gradients(model.module)
        optimizer.step(loss, step.count)
    found = model.state_bytes(), torch.cuda.max_memory_allocated()
    model.close()
    if world.is_main:
        (folder / "memory.json").write_text(json.dumps(found))


def memory() -> list[Line]:
    """Of a rank of two, GPT-2 small in bf16 with fp32 weights: 4 bytes of weights, 4 of gradients
    and 8 of AdamW's moments per parameter, shared out by ZeRO, and 2 of weights to compute with."""
    if not REAL:
        return [Line("memory", "ZeRO 0 to 3", "skipped: no hardware")]
    lines, peaks = [], []
    for zero in (0, 1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            launch(_memory_rank, Options(world_size=2, device="cuda"), zero, Path(folder))
            held, peak = json.loads((Path(folder) / "memory.json").read_text())
        parts = ", ".join(f"{kind} {n / 2**20:,.0f}" for kind, n in held.items())
        name = f"ZeRO {zero}" if zero else "whole replicas"
        lines.append(Line("memory", name, f"{parts}; peak {peak / 2**20:,.0f} MiB", None, peak))
        peaks.append(peak)
    lower = all(a > b for a, b in pairwise(peaks))
    return [*lines, Line("memory", "each stage has a lower peak", str(lower), lower)]


SECTIONS: dict[str, Callable[[], list[Line]]] = {
    "checks": checks, "verify": verify, "races": races, "waits": waits, "memory": memory,
    "speed": speed,
}  # fmt: skip


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    args = parser.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"{unknown[0]} is no section; there are {', '.join(SECTIONS)}")
    if REAL and not torch.cuda.is_available():  # again, with a device that has to come before torch
        if there := torch.cuda.device_count():  # the driver counts them; torch cannot use them
            built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda},"
            works = "a newer driver, or a torch that is built for an older CUDA, works"
            parser.exit(1, f"{built} cannot use the {counted(there, 'GPU')} here: {works}\n")
        if reason := missing():
            print(f"skipped: no GPU, and {reason}")
            return
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:]], environment()
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    lines = machine()
    print(*lines, sep="\n", flush=True)
    for name in args.sections or SECTIONS:
        start = time.perf_counter()
        try:
            found = SECTIONS[name]()
        except Exception as error:  # the other sections still run
            found = [Line(name, "ended by", f"{type(error).__name__}: {error}", False)]
        seconds = time.perf_counter() - start
        lines += [*found, Line(name, "", f"({seconds:.0f} s)")]
        print(*found, f"{'':8}({seconds:.0f} s)", sep="\n", flush=True)
        content = json.dumps([asdict(line) for line in lines], indent=2)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "gpu.json").write_text(content + "\n")  # at once: a later section may hang
    failed = [line for line in lines if line.ok is False]
    print(f"{len(failed)} of {sum(line.ok is not None for line in lines)} checks failed")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
