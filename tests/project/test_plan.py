"""The commands of plan.py, as a user types them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest
import yaml

from planning.describe import MACHINES
from project.plan import main
from tests.project.conftest import Refusal
from tests.project.programs import ROOT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict --model gpt2 --batch_size 8 --machine a10", "a YAML file, or one of a100-40gb"),
        ("search --model gpt2-xxl --batch_size 8", "(choose from 'gpt2-mini', 'gpt2', "),
        ("predict --model gpt2 --batch_size 8 --gpus 6 --dp 4", "gpus 6: 4 gpus work"),
        ("predict --model gpt2 --batch_size 9 --dp 4", "--batch_size 12 works"),
        ("predict --model gpt2 --batch_size 9 --dp 2 --micro_batch 4", "--batch_size 16 works"),
        ("search --n_layer 2 --heads 2 --batch_size 8", "--hidden, --vocab, --seq missing"),
        ("predict --model gpt2 --batch_size 8 --pp 13", "13 stages need"),
        ("predict --model gpt2 --n_embd 100 --batch_size 8", "--n_embd 108 works"),
        ("predict --model gpt2 --batch_size 8 --cp 5 --attention heads", "--attention ring works"),
        ("predict --model gpt2 --experts 6 --dp 4 --ep 4 --batch_size 8", "--ep 2 works"),
        ("predict --model gpt2 --experts 2 --top_k 4 --batch_size 8", "--top_k 2 works"),
        ("predict --model gpt2 --batch_size 8 --network fast", "GB/s, or one of ethernet-10"),
        ("predict --model gpt2 --batch_size 11 --dp 11", "gpus 11: nodes of 8 cannot share them"),
        ("simulate --stages 2 --num_microbatches 2 --forward 1,2,3", ", one for each of the ranks"),
        ("simulate --stages 2 --num_microbatches 2 --transfer -1", "finite number, 0 or more"),
        ("simulate --stages 2 --num_microbatches 2 --forward nan", "finite number, 0 or more"),
        ("simulate --stages 2 --num_microbatches 2 --forward 0 --backward_input 0 "
         "--backward_weight 0", "one must be above 0"),
        ("schedule --stages 2 --memory 0", "--memory 0: every schedule holds more; 1 works"),
        ("schedule --times none", "none: there is no such folder; name the --workdir of a run"),
        ("schedule --times run --transfer 1", "--times run --transfer: the run has measured it; "),
        ("search --model gpt2 --gpus 16 --batch_size 16 --tp 5", "--tp 5: no layout of --gpus 16"),
        ("search --model gpt2-mini --gpus 7 --batch_size 5", "--batch_size 7 works"),
        ("search --model gpt2 --gpus 3999999979 --batch_size 5", "9979: nodes of 8 cannot"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_sentence(words: str, message: str, refusal: Refusal) -> None:
    assert message in refusal(main, words.split())


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """What a command prints."""

    def call(words: str) -> str:
        main(words.split())
        return capsys.readouterr().out

    return call


Said = Callable[[str], str]
XL = "--model gpt2-xl --gpus 16 --machine a100-80gb --batch_size 512"


def test_the_commands_of_the_documentation(said: Said) -> None:
    found = said(
        f"predict {XL} --dp 2 --pp 2 --tp 4 --micro_batch 4 --seq 1024 --schedule 1f1b "
        "--recompute always --zero 1"
    )
    # XL has 1,557.6 M: positions, norms and biases are left out.
    assert found.startswith("1,555.0 M parameters in matrices, 16 x ")
    assert "\nIt fits: it needs " in found and "\n      1 " in found and "\n      2 " not in found
    found = said(
        "simulate --stages 8 --num_microbatches 24 --forward 10 --backward_input 9 "
        "--backward_weight 6 --transfer 0.3 --schedule zb"
    )
    seconds = 24 * 25 + 7 * (10 + 9 - 6) + 4 * 7 * 0.3
    assert f"step                {seconds:10.6g}\n" in found
    assert f"bubble              {1 - 600 / seconds:10.2%} " in found
    assert f"bubble over work    {seconds / 600 - 1:10.2%} " in found
    chosen = said(f"search {XL}")
    assert chosen.count("% slower: ") == 4
    documented = Path(__file__).parents[2].joinpath("docs/planning.md").read_text("utf-8")
    assert indent(chosen, "    ").rstrip() in documented


def test_a_machine_of_ones_own(said: Said, tmp_path: Path, refusal: Refusal) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("like: a100-80gb\nmemory_gb: 10\n", "utf-8")
    found = said(f"predict {XL} --dp 16 --machine {own}")
    assert "It does not fit: " in found and "of 10.0 GiB can be used." in found
    for figure, message in (
        ("memory_gbs: fast", "memory_gbs is 'fast', and must be a number above 0"),
        ("link_efficiency: 0", "link_efficiency is 0, and must be a number above"),
        ("host_us: -1", "host_us is -1, and must be a number, 0 or more"),
        ("tflops: 312", "tflops is 312, and must be numbers above 0 by precision"),
        ("loss: chunked", "loss is 'chunked', and must be fused or plain"),
        ("memori_gb: 10", "memori_gb is no figure of a machine; `like: a100-80gb`"),
        ("- 2", "it is no list of `figure: value`"),
        ("like: 5", "like: 5: a YAML file, or one of"),
    ):
        own.write_text(figure if "like" in figure else f"like: a100-80gb\n{figure}", "utf-8")
        assert message in refusal(said, f"predict {XL} --dp 16 --machine {own}")


def test_this_computer_is_a_machine(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cores are its GPUs, and what they reach is measured, not read from a file."""
    own = yaml.safe_load((MACHINES / "a100-80gb.yaml").read_text()) | {"gpus_per_node": 2}
    monkeypatch.setattr("benchmarks.calibrate.calibrate", lambda: own | {"memory_gb": 5})
    assert "\n2 x this on 1 node\n" in said(
        "search --model gpt2-mini --batch_size 8 --machine this"
    )
    found = said("predict --model gpt2-mini --batch_size 8 --machine this --network ethernet-10")
    assert "of 5.0 GiB can be used." in found


INTERRUPTED = """
import os, runpy, signal, sys
import planning.describe

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
planning.describe.machine = lambda *_: os.kill(os.getpid(), signal.SIGINT)
sys.argv = "plan.py search --model gpt2 --batch_size 8".split()
runpy.run_path("project/plan.py", run_name="__main__")
"""


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    words = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_no_command_is_printed_if_train_lacks_an_option(said: Said) -> None:
    """A command would train another model than the one that was priced."""
    model = "search --gpus 1 --batch_size 8 --top 1 --model gpt2"
    for words, lacking in (
        ("--ffn 1024", "--ffn 1024"),
        ("--kv_heads 4", "--kv_heads 4"),
        ("--gated_mlp --tied false", "--gated_mlp, --tied false"),
        ("--precision fp16", "--precision fp16 (bf16 works)"),
        ("--recompute selective", "--recompute selective (always works)"),
    ):
        last = said(f"{model} {words}").splitlines()[-1]
        assert last == f"No command trains this: train.py has no {lacking}."
    found = said(f"{model} --kv_heads 12 --ffn 3072")
    assert "train.py single --model gpt2 --vocab_size 50257 " in found


def test_ranks_are_ranks(said: Said) -> None:
    """In a V each rank has two stages. What it holds is counted in micro-batches of the whole rank,
    as in plot.py."""
    for option in ("--stages", "--num_devices"):
        found = said(f"simulate {option} 4 --num_microbatches 8 --schedule zbv")
        assert "zbv, 4 ranks, 8 micro-batches" in found
        assert "held at most        4, 4, 4, 4   per rank, in micro-batches" in found


def test_numbers_and_what_they_count(said: Said) -> None:
    """One is singular; thirds of a second leave no rounding in sums."""
    assert "1f1b, 1 rank, 1 micro-batch\n" in said("simulate --stages 1 --num_microbatches 1")
    assert ", 1 micro-batch\n\n" in said("predict --model gpt2 --batch_size 1")
    found = said("simulate --stages 2 --num_microbatches 4 --schedule interleaved --chunks 3")
    assert "2.333, 1.667 " in found and found.endswith("\n  fill                  1\n")
