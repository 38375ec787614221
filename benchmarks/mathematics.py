"""The formulas of docs/mathematics.md beside measurements: bytes on the wire, bytes held, bubbles,
seconds.

Bytes sent are counted by the kernel, per rank (wire.py); bytes held are the tensors'; bubbles and
seconds are of real steps, so this needs a quiet machine with two cores. The document shows the
printed table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from benchmarks.formulas import (
    FP32,
    all_reduce_bytes,
    boundary_bytes,
    held_microbatches,
    pipeline_bubble,
    reduce_scatter_bytes,
    zero,
    zero_traffic,
)
from benchmarks.harness import RESULTS, Row
from benchmarks.mathematics_measured import (
    MICROBATCHES,
    NUMEL,
    POSITIONS,
    SEQUENCES,
    STAGES,
    WIDTH,
    WORLDS,
    make_layers,
    measure,
)

TITLE = "Predicted and measured"


@dataclass(frozen=True)
class Claim:
    """The prediction of a formula. If it needs a measured number first, `predicted` is None."""

    what: str
    formula: str
    predicted: float | None
    unit: str


def claims() -> dict[str, Claim]:
    """All rows of the table, by name, with their predictions."""
    found: dict[str, Claim] = {}
    size = 4 * NUMEL
    for w in WORLDS:
        for name, predicted in {
            "all_reduce": all_reduce_bytes(size, w),
            "all_gather": reduce_scatter_bytes(size, w),
            "reduce_scatter": reduce_scatter_bytes(size, w),
        }.items():
            factor = "2 (W-1)/W" if name == "all_reduce" else "(W-1)/W"
            what = f"a rank sends, {name.replace('_', '-')} of {size / 1e6:.2f} MB, W={w}"
            found[f"{name} {w}"] = Claim(what, f"{factor} G", predicted, "MB")
    parameters = sum(p.numel() for p in make_layers().parameters())
    sends = ("2 (W-1)/W g P", "(W-1)/W (g + p) P", "(W-1)/W (g + p) P", "(W-1)/W (g + 2p) P")
    holds = ("(p + g + o) P", "(p + g + o/W) P", "(p + (g + o)/W) P", "(p + g + o)/W P")
    for z, strategy in enumerate(("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        found[f"sent {z}"] = Claim(
            f"a rank sends in a step, {strategy}, W=2", sends[z],
            zero_traffic(z, parameters, 2, FP32), "MB",
        )  # fmt: skip
        found[f"held {z}"] = Claim(
            f"a rank holds with AdamW, {strategy}, W=2", holds[z],
            zero(z, parameters, 2, FP32).total, "MB",
        )  # fmt: skip
    found["seconds"] = Claim(
        f"all-reduce of {size / 1e6:.2f} MB, W=2, at the link's measured rate",
        "2(W-1) a + 2 (W-1)/W G/b", None, "ms",
    )  # fmt: skip
    crossing = boundary_bytes(SEQUENCES, POSITIONS, WIDTH, 4)
    m = MICROBATCHES[0]
    found["boundary"] = Claim(
        f"cross the boundary of two threads in a step, M={m}", "2 B T H e", 2 * crossing, "MB"
    )
    found["sent pipeline"] = Claim(
        f"a rank sends in a step, pipeline of two processes, M={m}", "B T H e", crossing, "MB"
    )
    for name in ("gpipe", "1f1b"):
        for m in MICROBATCHES:
            predicted = float(100 * pipeline_bubble(STAGES, m))  # as written: backwards are whole
            found[f"bubble {name} {m}"] = Claim(
                f"idle, {name}, n={STAGES}, M={m}", "(n-1)/(M+n-1)", predicted, "%"
            )
        m = MICROBATCHES[-1]
        found[f"alive {name}"] = Claim(
            f"micro-batches held by stage 0, {name}, M={m}",
            {"gpipe": "M", "1f1b": "min(M, n-s)"}[name],
            held_microbatches(name, STAGES, m, 0),
            "",
        )  # fmt: skip
    return found


_SCALE = {"MB": 1e-6, "ms": 1e3, "%": 1.0, "": 1.0}


def format_line(claim: Claim, predicted: float, measured: float) -> str:
    """A line of the table."""
    scale, digits = _SCALE[claim.unit], {"MB": 3, "ms": 2, "%": 1, "": 0}[claim.unit]
    numbers = (f"{value * scale:>9,.{digits}f} {claim.unit:<2}" for value in (predicted, measured))
    return (
        f"{claim.what:<60} {claim.formula:<25}"
        + " ".join(numbers)
        + (f" {measured / predicted:>6.2f}")
    )


HEADER = f"{'':<60} {'formula':<25}{'predicted':>12} {'measured':>12}  ratio"


def run() -> list[Row]:
    """Measures everything, prints the table, and writes it as JSON."""
    measured, rows = measure(), []
    print(TITLE, "-" * len(TITLE), HEADER, sep="\n")
    for key, claim in claims().items():
        predicted = claim.predicted or measured["predicted seconds"]
        print(format_line(claim, predicted, measured[key]))
        value = measured[key]
        rows.append(
            Row(claim.what, value, (value, value), claim.unit, value / predicted, "of the formula")
        )
    print(flush=True)
    RESULTS.mkdir(exist_ok=True)
    content = {key: {"measured": value} for key, value in measured.items()}
    (RESULTS / "mathematics.json").write_text(json.dumps(content, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    run()
