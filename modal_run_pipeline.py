"""Trains GPT-2 with its layers on two GPUs of one machine, rented from modal.com.

    modal run modal_run_pipeline.py --model-parallel-mode pipeline_parallel
    modal run modal_run_pipeline.py --model-parallel-mode model_parallel

See modal_run.py for the set-up, for --options, and for where the results are.
"""

from __future__ import annotations

from pathlib import Path

import modal

from modal_run import HOURS, fetch, image, run, volume

app = modal.App("parallel-gpt2-pipeline")


@app.function(image=image, gpu="A10G:2", volumes={"/results": volume}, timeout=12 * HOURS)
def train(mode: str, n_epochs: int, options: str, results: str = "/results") -> dict[str, bytes]:
    """Trains in a container with two GPUs."""
    options = f"--model_parallel_mode {mode} --n_epochs {n_epochs} {options}"
    return run("run_pipeline.py", mode, options, results)


@app.local_entrypoint()
def main(
    model_parallel_mode: str = "pipeline_parallel", n_epochs: int = 5, options: str = ""
) -> None:
    """The entry point of `modal run`."""
    files = train.remote(model_parallel_mode, n_epochs, options)
    fetch(files, Path("workdir_modal") / model_parallel_mode)
