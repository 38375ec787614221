"""What only a GPU can show: python -m tests.gpu, the first half of `make gpu`.

    checks    every program, and tests of pipelines, on the real device
    verify    rows of `make verify`: every kind of layout against one plain process
    races     the same forward and backward 50 times, bit for bit

    python -m tests.gpu races                 some of them

With two GPUs ranks exchange over NCCL. Ranks that share a GPU exchange over gloo. The exit status
is 1 if a check fails. Without a GPU nothing runs: tests/device has a device without hardware, and
the tests that it allows. What is measured on a GPU: benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.equivalence.compare import laid_out
from tests.equivalence.table import find
from training.launch.errors import counted
from training.launch.launch import launch
from training.launch.world import World
from training.layouts.layout import parameters_of
from training.options import Options

ROOT = Path(__file__).resolve().parents[2]
SAME_STEPS = 50  # of `races`
LIMIT = 300.0  # seconds that a program may take; several start at once
Line = tuple[str, str]  # what was checked, and why it failed; empty: it held

SMALL = "--model gpt2-mini --n_train 256 --n_validation 64 --n_test 16 --batch_size 32 --dropout 0"
EQUAL = f"{SMALL} --num_batches 4 --check_weights --check_output"
TESTED = (
    "tests/pipeline/test_pipe.py", "tests/pipeline/test_randomness.py",
    "tests/context_parallel/test_attention.py",
)  # fmt: skip


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
        [f"train.py context --world_size {heads} {EQUAL} --precision bf16 --workdir context"],
        ["train.py single --vgg_width 16 --n_train 256 --n_validation 64 --num_batches 4"],
    ]  # fmt: skip


def checks() -> list[Line]:
    """Programs, with evaluation, translation, checkpoint and resume, or compared with one process
    weight by weight; and those tests that take what devices there are."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as some:
        chains = some.map(partial(run_chain, folder=Path(folder)), programs(gpus()))
        lines = [line for of_chain in chains for line in of_chain]
    tested = [sys.executable, "-m", "pytest", "-q", "-x", *TESTED]
    return [*lines, (f"pytest {' '.join(TESTED)}", failure_of(tested, ROOT))]


def run_chain(chain: list[str], folder: Path) -> list[Line]:
    """Some command lines, one after the other."""
    lines = []
    for words in map(shlex.split, chain):
        command = [sys.executable, str(ROOT / "project" / words[0]), *words[1:]]
        failure = failure_of([*command, "--device", "cuda"], folder)
        lines.append((" ".join(words[:4]), failure))
    return lines


def failure_of(command: list[str], folder: Path) -> str:
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
    "single-one_more", "single-resumed", "single-recompute_always",
    "threads2-gpipe-m3", "threads2-1f1b-m8", "threads2-zb-clipped", "threads2-interleaved-v2_m3",
    "threads3-1f1b-resumed", "module2-gpt2", "module2-vgg16", "blocks2-split_size3",
    "ddp2-per_parameter-one_more", "ddp2-overlap-one_more", "ddp2-gloo-resumed",
    "fsdp2-zero1-clipped", "fsdp2-zero2-m2", "fsdp2-zero3-no_target", "fsdp2-zero3-resumed",
    "fsdp2-zero3-recompute_always", "pipeline2-gpipe-m3", "pipeline2-zb-clipped",
    "pipeline2-zbv-v2_m8", "pipeline2-1f1b-resumed", "mesh2-1x1x2", "mesh2-1x1x2-sequence",
    "mesh4-2x1x2-sequence-zero3", "mesh4-1x2x2-sequence", "mesh4-2x2x1-zero1",
    "context2-ring", "context2-heads-no_dropout",
)  # fmt: skip


def verify() -> list[Line]:
    """Losses, gradients and weights of four steps in float64, by parameter name. Ranks share the
    GPUs; stages in threads are on GPUs of their own where there are enough, else on the CPU."""
    # Of blocks2 the batch is on the GPU, and stages that find none for each are not.
    rows = [name for name in VERIFIED if gpus() > 1 or not name.startswith("blocks2")]
    command = [sys.executable, "-m", "tests.equivalence", "--device", "cuda", "--steps", "4"]
    return [("rows, in float64", failure_of([*command, "--strategy", ",".join(rows)], ROOT))]


RACED = {
    1: ("single-dropout", "threads2-1f1b-m8", "threads2-zb-m8", "module2-gpt2"),
    2: ("ddp2-overlap-dropout", "fsdp2-zero3-dropout", "pipeline2-1f1b-dropout",
        "pipeline2-zb-dropout", "mesh2-1x1x2-sequence"),
}  # fmt: skip


def same_bits(name: str, world: World) -> bool:
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


def race_rank(world: World, folder: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in RACED[2]:
        same = same_bits(name, world)
        (folder / f"{name}.{world.rank}").write_text(str(same))


def races() -> list[Line]:
    """Streams and threads must not show in a bit. Kernels that add atomically would: they are told
    to be deterministic."""
    same = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        world = World(device=torch.device("cuda", 0))
        for name in RACED[1]:
            same[name] = same_bits(name, world)
    finally:
        torch.use_deterministic_algorithms(False)
    with tempfile.TemporaryDirectory() as folder:
        launch(race_rank, Options(world_size=2, device="cuda"), Path(folder))
        for name in RACED[2]:
            verdicts = [(Path(folder) / f"{name}.{r}").read_text() for r in range(2)]
            same[name] = verdicts == ["True", "True"]
    return [(name, "" if held else "other bits") for name, held in same.items()]


def gpus() -> int:
    """How many there are."""
    return torch.cuda.device_count()


SECTIONS: dict[str, Callable[[], list[Line]]] = {
    "checks": checks, "verify": verify, "races": races,
}  # fmt: skip


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    sections = parser.parse_args().sections or list(SECTIONS)
    if unknown := [name for name in sections if name not in SECTIONS]:
        parser.error(f"{unknown[0]} is no section; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        if gpus():  # the driver counts them; torch cannot use them
            built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda},"
            works = "a newer driver, or a torch that is built for an older CUDA, works"
            parser.exit(1, f"{built} cannot use the {counted(gpus(), 'GPU')} here: {works}\n")
        print("skipped: no GPU; what needs none is in tests/device")
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    lines: list[Line] = []
    for section in sections:
        start = time.perf_counter()
        try:
            of_section = SECTIONS[section]()
        except Exception as error:  # the other sections still run
            of_section = [("ended", f"{type(error).__name__}: {error}")]
        for name, failure in of_section:
            print(f"{section:8}{name:60}{f'FAILED: {failure}' if failure else 'ok'}", flush=True)
        print(f"{'':8}({time.perf_counter() - start:.0f} s)", flush=True)
        lines += of_section
    failed = [name for name, failure in lines if failure]
    print(f"{len(failed)} of {len(lines)} checks failed")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
