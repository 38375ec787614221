"""The commands of plan.py, as a user types them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planning.table import summary
from project.plan import main
from tests.project.conftest import Refusal


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("calibrate --output /no/such/m.yaml", "it must name a file in an existing folder"),
        ("calibrate --output /", "it must name a file in an existing folder"),
        ("predict --model gpt2 --batch_size 8 --machine a10", "a YAML file, or one of a100-40gb"),
        ("search --model gpt2-xxl --batch_size 8", "or llama-3-405b; is it gpt2-xl?"),
        ("predict --model gpt2 --batch_size 8 --gpus 6 --dp 4", "gpus 6: 4 gpus work"),
        ("predict --model gpt2 --batch_size 9 --dp 4", "--batch_size 12 works"),
        ("predict --model gpt2 --batch_size 8 --pp 13", "13 stages need"),
        ("predict --model gpt2 --batch_size 8 --chunks 2", "--pp 1: one rank has one stage"),
        ("predict --model gpt2 --n_embd 100 --batch_size 8", "--n_embd 108 works"),
        ("predict --model gpt2 --batch_size 8 --network fast", "GB/s, or one of ethernet-10"),
        ("predict --model gpt2 --batch_size 11 --dp 11", "gpus 11: nodes of 8 cannot share them"),
        ("simulate --stages 2 --num_microbatches 2 --forward 1,2,3", "one for each of --stages 2"),
        ("simulate --stages 2 --num_microbatches 2 --transfer -1", "finite number, 0 or more"),
        ("simulate --stages 2 --num_microbatches 2 --forward nan", "finite number, 0 or more"),
        ("simulate --stages 2 --num_microbatches 2 --timeline", "what --json prints; --json works"),
        ("search --model gpt2 --gpus 16 --batch_size 16 --tp 5", "--tp 5: no layout of --gpus 16"),
        ("check no.csv --machine h100", "no.csv: No such file"),
        ("search --model gpt2-mini --gpus 7 --batch_size 5", "--batch_size 7 has some"),
        ("search --model gpt2 --gpus 13 --batch_size 5", "gpus 13: nodes of 8 cannot share them"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_sentence(words: str, message: str, refusal: Refusal) -> None:
    assert message in refusal(main, words.split())


Run = Callable[[str], Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command says in JSON."""

    def said(words: str) -> Any:
        main([*words.split(), "--json"])
        return json.loads(capsys.readouterr().out)

    return said


XL = "--model gpt2-xl --gpus 16 --machine a100-80gb --batch_size 512"


def test_the_commands_of_the_documentation(run: Run) -> None:
    found = run(
        f"predict {XL} --dp 2 --pp 2 --tp 4 --micro_batch 4 --seq 1024 --schedule 1f1b "
        "--recompute always --zero 1"
    )
    assert found["fits"] is True
    assert len(found["memory_of_stages"]) == 2
    timed = run(
        "simulate --stages 8 --num_microbatches 24 --forward 10 --backward_input 9 "
        "--backward_weight 6 --transfer 0.3 --schedule zb"
    )
    assert timed["seconds"] == pytest.approx(24 * 25 + 7 * (10 + 9 - 6) + 4 * 7 * 0.3)
    assert timed["bubble"] == pytest.approx(1 - 600 / timed["seconds"])
    chosen = run(f"search {XL} --top 2")
    assert len(chosen["best"]) == 2
    assert chosen["command"].startswith(  # as in docs/faults.md
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "
        "FIRST_HOST:29400 --rdzv-id my_run --local-addr THIS_HOST project/train.py fsdp "
    )


def test_a_machine_of_ones_own(run: Run, tmp_path: Path, refusal: Refusal) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("like: a100-80gb\nmemory_gb: 10\n", "utf-8")
    found = run(f"predict {XL} --dp 16 --machine {own}")
    assert (found["memory_limit_gb"], found["fits"]) == (10, False)
    for figure, message in (
        ("memory_gbs: fast", "memory_gbs is 'fast', and must be a number above 0"),
        ("link_efficiency: 0", "link_efficiency is 0, and must be a number above"),
        ("host_us: -1", "host_us is -1, and must be a number, 0 or more"),
        ("gpus_per_node: 2.5", "gpus_per_node is 2.5, and must be a whole number"),
        ("tflops: 312", "tflops is 312, and must be numbers above 0 by precision"),
        ("tflops: {fp8: 1}", "numbers above 0 by precision, such as {bf16: 312}"),
        ("loss: chunked", "loss is 'chunked', and must be fused or plain"),
        ("memori_gb: 10", "memori_gb is no figure of a machine; did you mean memory_gb?"),
        ("1: 2", "1 is no figure of a machine"),
        ("like: 5", "--machine 5: a YAML file, or one of"),
        (f"like: {own}", f"`like: {own}` leads back to it; `like: a100-80gb` works"),
    ):
        own.write_text(figure if "like" in figure else f"like: a100-80gb\n{figure}", "utf-8")
        assert message in refusal(run, f"predict {XL} --dp 16 --machine {own}")


def test_a_table_is_compared_row_by_row(
    run: Run, refusal: Refusal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    check = f"check {path} --machine a100-80gb"
    head = "model,global_batch,gpus,dp,tp,precision,schedule,seconds_per_step,fits\n"
    one = "gpt2-medium,64,8,8,1,fp16,1f1b,0.5,1\n"
    path.write_text(f"# a comment\n{head}{one}gpt2-medium,64,8,1,8,fp16,1f1b,9,0\n", "utf-8")
    rows = run(check)
    assert [row["seconds_per_step"] for row in rows] == [0.5, 9]
    assert [row["fits"] for row in rows] == [True, False]
    assert [row["predicted_fits"] for row in rows] == [True, True]
    errors = summary(rows)
    assert (errors["rows"], errors["pairs_in_order"], errors["regret"]) == (2, 1, 0)
    assert errors["fits_right"] == 0.5
    zb2p = one.replace("1f1b", "zb-2p")
    path.write_text((head + one + 7 * zb2p).replace(",", ";"), "utf-8")
    mixed = run(check)
    assert [row["predicted_seconds"] is None for row in mixed] == [False, *7 * [True]]
    assert (mixed[1]["seconds_per_step"], summary(mixed)["rows"]) == (0.5, 1)
    main(check.split())
    said = capsys.readouterr().out
    assert re.search("\n7 not predicted.*row 6: [^\n]*'zb-2p'[^\n]*\n\n", said, re.S)
    for text, message in (
        ("layers,hidden,seq,global_batch\n1,1,1,1\n", "the column heads is missing"),
        (head + one.replace("0.5", "fast"), "row 1: seconds_per_step is 'fast', and must be"),
    ):
        path.write_text(text, "utf-8")
        assert message in refusal(run, check)


def test_a_user_reads_no_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Thirds of a second leave rounding in sums. A table without times says so."""
    words = "simulate --stages 2 --num_microbatches 4 --schedule interleaved --chunks 3"
    main(words.split())
    said = capsys.readouterr().out
    assert "2.333, 1.667 " in said
    assert "fill                  1\n\n" in said
    (tmp_path / "runs.csv").write_text("model,global_batch,seconds\ngpt2,8,1\n", "utf-8")
    main(["check", str(tmp_path / "runs.csv"), "--machine", "h100"])
    assert "No row has a time to compare: seconds_per_step" in capsys.readouterr().out
