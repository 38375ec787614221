"""Trains GPT-2 with data parallelism on GPUs rented from modal.com, one per process.

    pip install modal && modal setup                        once: it asks for an account
    modal run modal_run.py --world-size 2 --n-epochs 5

More options of project/run_data_parallel.py go into --options, in quotes: --options "--seed 1".
Results stay in the volume `parallel-gpt2`; the figures and the summary also come to workdir_modal/.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import modal

HERE = Path(__file__).resolve().parent
LEFT_OUT = [".venv", ".git", "workdir*", "**/__pycache__", "tests", "submit_figures"]
FETCHED = ("*.png", "summary.json", "metrics.jsonl")
HOURS = 60 * 60

app = modal.App("parallel-gpt2")
volume = modal.Volume.from_name("parallel-gpt2", create_if_missing=True)
# In every container the repository is in /root, the working directory.
image = (
    modal.Image.debian_slim(python_version="3.11")
    .pip_install_from_requirements(str(HERE / "requirements.txt"))
    .add_local_dir(str(HERE), "/root", ignore=LEFT_OUT)
)


def run(program: str, name: str, options: str, results: str) -> dict[str, bytes]:
    """Runs a program of project/ in the container; returns the files to look at first.

    Raises:
        subprocess.CalledProcessError: it failed, and has printed why.
    """
    workdir = Path(results) / name
    command = [sys.executable, str(HERE / "project" / program), "--workdir", str(workdir)]
    subprocess.run([*command, *options.split()], check=True, cwd=results)
    return {path.name: path.read_bytes() for mask in FETCHED for path in workdir.glob(mask)}


def fetch(files: dict[str, bytes], folder: Path) -> None:
    """Writes the files into a local folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    print(f"Fetched {len(files)} files into {folder}{os.sep}")


@app.function(image=image, gpu="A10G", volumes={"/results": volume}, timeout=12 * HOURS)
def train(
    world_size: int, n_epochs: int, options: str, results: str = "/results"
) -> dict[str, bytes]:
    """Trains in a container with a GPU for each process."""
    options = f"--world_size {world_size} --n_epochs {n_epochs} {options}"
    return run("run_data_parallel.py", f"data_parallel_{world_size}", options, results)


@app.local_entrypoint()
def main(world_size: int = 2, n_epochs: int = 5, options: str = "") -> None:
    """The entry point of `modal run`."""
    with_gpus = train.with_options(gpu=f"A10G:{world_size}")
    files = with_gpus.remote(world_size, n_epochs, options)
    fetch(files, Path("workdir_modal") / f"data_parallel_{world_size}")
