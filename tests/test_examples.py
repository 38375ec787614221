"""Rented GPUs, clusters, containers, a notebook: each as far as it can be tested here."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import shlex
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from examples import lora
from examples import pipeline_of_any_model as any_model
from project import plot
from tests.project.programs import ROOT, TINY, finish, parse
from tests.ranks import Ranks, under_torchrun
from tests.test_readme import check

BATCHES = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))


pytestmark = pytest.mark.usefixtures("elsewhere")


def _here(command: list[str], **_: object) -> None:
    """Runs a program of ours in this process, which has imported its libraries."""
    assert Path(command[1]).is_file()
    finish(" ".join([Path(command[1]).stem, *command[2:]]))


@pytest.mark.filterwarnings("ignore:The train function is executing locally")
def test_modal_trains_and_hands_back_what_is_to_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs in the container, run here: it needs no account."""
    import modal_run  # here: it takes a second to import
    import modal_run_pipeline

    monkeypatch.setattr("modal_run.subprocess.run", _here)
    files = modal_run.train.local(1, 1, TINY, str(tmp_path))
    assert files.keys() == {"summary.json", "metrics.jsonl"}  # programs.py leaves out the picture
    assert json.loads(files["summary.json"])["world_size"] == 1
    modal_run.fetch(files, tmp_path / "here")
    assert (tmp_path / "here" / "summary.json").read_bytes() == files["summary.json"]

    files = modal_run_pipeline.train.local("pipeline_parallel", 1, TINY, str(tmp_path))
    assert json.loads(files["summary.json"])["model_parallel_mode"] == "pipeline_parallel"


@pytest.mark.parametrize("batch", BATCHES, ids=[batch.stem for batch in BATCHES])
def test_slurm_gets_a_script_whose_command_is_good(
    batch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many ranks as there are GPUs."""
    subprocess.run(["bash", "-n", batch], check=True)
    text = batch.read_text().replace("\\\n", " ")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)", text, re.MULTILINE))
    command = re.search(r"torchrun +--(standalone|nnodes).*", text)
    assert command is not None
    check(command[0], monkeypatch)
    words = shlex.split(command[0])
    assert "--dataset" in words
    sizes = [int(words[words.index(f"--{x}") + 1]) for x in ("dp", "pp", "tp") if f"--{x}" in words]
    assert math.prod(sizes) == int(asked["nodes"]) * int(asked["gpus-per-node"])


@pytest.mark.parametrize("batch", BATCHES, ids=[batch.stem for batch in BATCHES])
@pytest.mark.parametrize("notice", [True, False])
def test_slurm_requeues_a_job_that_has_saved_on_notice(
    batch: Path, notice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun and scontrol are replaced: the run leaves what it leaves when it gets SIGTERM (see
    tests/training/launch/test_notice.py), or fails."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    programs = {
        "srun": f"mkdir -p workdir_job; {'touch workdir_job/ended_on_notice; ' * notice}exit 1",
        "scontrol": 'if [ "$1" = show ]; then echo node1; else echo "$@" >> asked; fi',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in (("JOB_NAME", "job"), ("JOB_ID", "7"), ("NNODES", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert subprocess.run(["bash", batch], cwd=tmp_path).returncode == 1
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if notice else "")


NOTEBOOK = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())
CELLS = [cell["source"] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs(ranks: Ranks, tmp_path: Path) -> None:
    """Its commands, on a smaller model; the picture that it shows is there in the end."""
    lines = "".join("".join(source) + "\n" for source in CELLS)
    for program, options in re.findall(r"^!{python} project/(\w+)\.py (.*)$", lines, re.MULTILINE):
        options = options.replace("workdir_notebook", str(tmp_path / "workdir_notebook"))
        if program == "plot":
            plot.draw_figure(plot.parse_plot(options.split()))
            continue
        smaller = f"{program} {options} {TINY} --n_epochs 1".replace("--world_size 2", "")
        alone = program == "run_pipeline"
        finish(smaller, None if alone else ranks)
    (shown,) = re.findall(r'Image\("(.*)"\)', lines)
    assert (tmp_path / shown).is_file()


def test_the_first_cell_of_the_notebook_may_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves examples/ once, and installs where its own Python is."""
    *lines, install = CELLS[0]
    assert install == "%pip install --quiet -r requirements.txt"
    (tmp_path / "repository/examples").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repository/examples")
    for _ in range(2):
        exec("".join(lines), {})
        assert Path.cwd() == tmp_path / "repository"


def test_any_model_learns_in_two_stages_what_it_learns_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Llama."""
    monkeypatch.setattr(any_model, "STEPS", 3)
    model, second_stage = any_model.models()[1]  # GPT-2: tests/pipeline/tracing/test_trace.py
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the stages would draw other masks
    alone = copy.deepcopy(model)
    losses = any_model.train(model, second_stage)
    assert losses[-1] < losses[0]
    x, labels = any_model.batch()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=any_model.LEARNING_RATE)
    for loss in losses:
        optimizer.zero_grad()
        of_batch = any_model.loss_of(alone(**x), labels) / labels.numel()
        of_batch.backward()
        optimizer.step()
        # the batch is added up in four parts: rounding, some 1e-7
        assert of_batch.item() == pytest.approx(loss, abs=1e-5)


LETTERS: dict[str, Any] = {
    "vocab_size": 26, "n_positions": 16, "n_layer": 2, "n_head": 2,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
}  # fmt: skip
STEPS = 3
LoRA = dict[str, torch.Tensor]


def adapted() -> tuple[Any, LoRA]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, **LETTERS)).double()
    adapters = lora.adapt(model)
    for p in adapters.values():  # else the gradients of all A would be 0
        p.data = torch.randn(p.shape, dtype=torch.float64)
    return model, adapters


@functools.cache
def adapters_of_one_process() -> LoRA:
    """By transformers and torch alone, on the whole batch. What is frozen does not move."""
    model, adapters = adapted()
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(adapters.values(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=lora.LETTERS[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.mT, lora.LETTERS[:, 1:]).backward()
        optimizer.step()
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert moved == [*adapters]
    return adapters


def train_adapters(_rank: int, _world_size: int, strategy: Callable[..., None]) -> LoRA:
    """The adapters."""
    model, adapters = adapted()
    strategy(model, adapters, STEPS)
    return {name: p.detach() for name, p in adapters.items()}


@pytest.mark.parametrize("strategy", [lora.in_stages, lora.on_ranks, lora.in_shards])
def test_adapters_are_those_of_one_process(ranks: Ranks, strategy: Callable[..., None]) -> None:
    alone = strategy is lora.in_stages
    trained = [train_adapters(0, 1, strategy)] if alone else ranks.run(train_adapters, strategy)
    wanted = adapters_of_one_process()
    assert [name.rpartition(".")[0] for name in wanted][::2] == [*lora.CHOSEN]
    for adapters in trained:
        assert adapters.keys() == wanted.keys()
        for name, p in adapters.items():  # sums in another order, in float64
            torch.testing.assert_close(p, wanted[name].data, rtol=1e-9, atol=1e-12)


def test_adapters_are_loaded_alone_or_refused(tmp_path: Path) -> None:
    """Into a model like theirs. Another one stays as it was."""
    file = str(tmp_path / "adapters.safetensors")
    (model, adapters), (other, others) = adapted(), adapted()
    for p in adapters.values():
        p.data.add_(1)
    save_file(adapters, file)
    lora.load(file, others)
    x = lora.LETTERS[:, :-1]
    assert torch.equal(model(input_ids=x).logits, other(input_ids=x).logits)
    first, *_, last = sorted(adapters)
    for saved, name in (
        ({**adapters, last: torch.ones(3, 3)}, last),
        ({n: p for n, p in adapters.items() if n != first}, first),
        ({**adapters, "a": torch.ones(1)}, "a"),
    ):
        save_file(saved, file)
        before = {n: p.clone() for n, p in others.items()}
        with pytest.raises(ValueError, match=f"adapters of another model, see {name}$"):
            lora.load(file, others)
        assert all(torch.equal(p, before[n]) for n, p in others.items())


def test_adapters_change_nothing_until_they_are_trained() -> None:
    model, x = GPT2LMHeadModel(GPT2Config(n_embd=8, **LETTERS)), lora.LETTERS[:, :-1]
    before = model(input_ids=x).logits
    lora.adapt(model)
    assert torch.equal(model(input_ids=x).logits, before)


RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.txt"))


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_recipe_can_be_typed_and_says_where_it_is_from_and_what_to_expect(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked of the hub. A large one is of a run under torchrun."""
    monkeypatch.setattr("project.rules.size_of_tokenizer", lambda _: 50257)
    head = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    assert f"project/train.py @examples/recipes/{path.name}\n" in head
    small = path.stem.startswith("small_")
    assert ("Expect a validation loss of " if small else "Not run here.") in head
    with nullcontext() if small else under_torchrun(0, 8):
        args = parse(f"train @{path} --device cpu")
    assert args.world_size == (2 if small else 8)


def test_the_small_recipes_run(ranks: Ranks) -> None:
    """Each as far as four steps of a tiny model show."""
    for path in RECIPES:
        if path.stem.startswith("small_"):
            less = "--num_batches 4 --warmup_steps 2 --n_layer 1 --n_embd 16 --n_head 2 --n_test 2 "
            few = "--batch_size 6 --n_train 20 --n_validation 9 --vocab_size 300"
            decay = "--decay_steps 2" if "wsd" in path.read_text() else ""
            finish(f"train @{path} {less} {few} {decay}", ranks)
