"""metrics.jsonl: every step once, also through a resume, and the same under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest

from tests.project.programs import TINY, run, summary
from tests.ranks import Ranks
from training.optimization import GlobalOptimizer

pytestmark = pytest.mark.usefixtures("elsewhere")

LINE = TINY + "--n_epochs 2 --dropout 0.1 --precision fp64 --lr_scheduler cosine --warmup_steps 2 "
STEP = {
    "epoch", "step", "loss", "learning_rate", "gradient_norm", "seconds", "tokens_per_sec",
    "real_tokens_per_sec", "peak_rss_bytes", "skipped",
}  # fmt: skip


def read(workdir: str = "work") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of steps, and those of evaluations."""
    lines = [json.loads(line) for line in Path(workdir, "metrics.jsonl").read_text().splitlines()]
    return [x for x in lines if "loss" in x], [x for x in lines if "loss" not in x]


def test_every_step_has_a_line_with_the_same_numbers_under_every_layout_and_after_a_resume(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard gets them, too, and so does Weights & Biases. Both take a second to import."""
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged: list[tuple[int, dict[str, Any]]] = []  # by W&B, whose own files take it seconds
    of_wandb = SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)))
    begin, end = Mock(return_value=of_wandb), Mock()
    monkeypatch.setattr("wandb.init", create_autospec(wandb.init, side_effect=begin))
    monkeypatch.setattr("wandb.finish", end)
    monkeypatch.setenv("WANDB_MODE", "offline")  # else a login is asked for
    norms: list[float] = []

    def note_norms(_: int, patches: pytest.MonkeyPatch) -> None:
        step = GlobalOptimizer.step

        def noted(self: GlobalOptimizer, *given: Any) -> str | None:
            said = step(self, *given)
            norms.append(self.norm)
            return said

        patches.setattr(GlobalOptimizer, "step", noted)

    line = f"train single {LINE} --workdir one --tensorboard --wandb"
    assert run(line, None, note_norms)[1] is None
    steps, evaluations = read("one")
    assert [x["step"] for x in steps] == list(range(1, 9))
    assert [x["epoch"] for x in steps] == [0] * 4 + [1] * 4
    assert [x["loss"] for x in steps] == summary("one")["loss"]
    assert [x["gradient_norm"] for x in steps] == norms
    assert steps[0]["learning_rate"] == 0.005 and steps[1]["learning_rate"] == 0.01
    assert all(x.keys() == STEP for x in steps)
    assert [(x["step"], x["epoch"]) for x in evaluations] == [(4, 0), (8, 1)]
    assert not any(key.endswith("tokens_per_sec") for x in evaluations for key in x)
    assert evaluations[1]["validation_loss"] == summary("one")["validation_loss"]
    shown = EventAccumulator("one/tensorboard").Reload().Scalars("loss")
    assert [e.value for e in shown] == pytest.approx([x["loss"] for x in steps])
    settings = begin.call_args.kwargs
    assert (settings["resume"], settings["config"]["n_layer"]) == ("auto", 2)
    assert end.call_count == 1
    of_steps = [(step, numbers["loss"]) for step, numbers in logged if "loss" in numbers]
    assert of_steps == [(x["step"], x["loss"]) for x in steps]

    # The checkpoint is of step 2: what was written of later steps goes, and a line cut off.
    assert run(f"train ddp {LINE} --save_every 2", ranks, stop_at=3)[1] is None
    assert [x["step"] for x in read()[0]] == [1, 2, 3]
    with Path("work/metrics.jsonl").open("a") as file:
        file.write('{"epoch": 0, "st')
    assert run(f"train pipeline {LINE} --resume", ranks)[1] is None  # whose ranks see all examples
    found, evaluations = read()
    assert [x["step"] for x in evaluations] == [4, 8]
    epoch = json.loads(Path("work/eval_results_epoch1.json").read_text())
    # Two ranks that see the same batch count it once; each has its own seconds.
    positions = sum(x["tokens_per_sec"] * x["seconds"] for x in found if x["epoch"] == 1)
    assert positions == pytest.approx(epoch["tokens_per_sec"] * epoch["training_time"], rel=0.3)
    for here, there in zip(steps, found, strict=True):
        for key in ("step", "loss", "learning_rate", "gradient_norm"):
            assert there[key] == pytest.approx(here[key], rel=1e-9)
        tokens = [x["real_tokens_per_sec"] * x["seconds"] for x in (here, there)]
        assert tokens[1] == pytest.approx(tokens[0])
