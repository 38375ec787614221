"""Tables of measured runs: reads them, predicts their rows, and sums up how wrong that is.

A table is a CSV file; a row is a run. COLUMNS are its columns, REQUIRED those that it needs; names
and words may be those of train.py, too. docs/planning_details.md says what is assumed otherwise.

Every mistake is a ValueError of one sentence with the value, the rule, and what works.
"""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, get_type_hints

from pipeline.schedules.catalogue import SCHEDULES

from .cost import LOGITS, PricedStep
from .describe import MODELS, Layout, Machine, Model, as_number, choices, layout_of, model_of

REQUIRED = ("layers", "hidden", "heads", "seq", "global_batch")  # or a model, and global_batch
MEASURED = ("seconds_per_step", "memory_gb", "fits")
SIZES, LAYOUT = (get_type_hints(kind, include_extras=True) for kind in (Model, Layout))
del LAYOUT["batch_size"], LAYOUT["order"]
LAYOUT["schedule"] = Annotated[str, tuple(SCHEDULES)]  # sequential, too, as run_pipeline.py has it
COLUMNS = ("model", *SIZES, "gpus_per_node", "global_batch", *LAYOUT, "loss", *MEASURED)
SPELLINGS = {  # of columns, and of words in them
    "n_layer": "layers", "n_embd": "hidden", "n_head": "heads", "n_kv_head": "kv_heads",
    "vocab_size": "vocab", "model_max_length": "seq", "batch_size": "global_batch",
    "full": "always", "recompute 1": "always", "recompute 0": "never", "afab": "gpipe",
    "zb-h1": "zb", "zbh1": "zb", "zb-1p": "zb", "zb1p": "zb", "zb-v": "zbv", "v-half": "vhalf",
    "v-min": "vmin", "1f1b-i": "interleaved", "interleaved-1f1b": "interleaved",
    "1f1b-interleaved": "interleaved", "no-shard": "0", "ddp": "0", "zero-1": "1", "zero-2": "2",
    "shard-grad-op": "2", "zero-3": "3", "full-shard": "3", "fsdp": "3", "float16": "fp16",
    "amp-fp16": "fp16", "bfloat16": "bf16", "amp-bf16": "bf16", "float32": "fp32",
    "true": "1", "yes": "1", "false": "0", "no": "0",
}  # fmt: skip
SILENT = ("", "-", "?", "na", "n/a", "nan", "none", "null", "unknown")  # a cell that says nothing
MORE = "MORE"  # the cells of a row that no column is for: a header is read in small letters
PREDICTED = ("predicted_seconds", "predicted_memory_gb", "predicted_fits")

Row = Mapping[str, str]


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table, with the names of COLUMNS. Lines that begin with # are comments."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it is not UTF-8; a table is a CSV file of text") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    separator = max(",;\t", key="".join(lines[:1]).count)  # the one that its first line has most
    table = csv.DictReader(lines, restkey=MORE, restval="", delimiter=separator)
    names = [name.strip().lower() for name in table.fieldnames or ()]
    table.fieldnames = [SPELLINGS.get(name, name) for name in names]
    rows = [{n: "".join(cell) for n, cell in row.items() if n} for row in table]
    rows = [row for row in rows if any(row.values())]
    if not rows:
        raise ValueError(f"{path}: it has no rows")
    for name in rows[0].keys() - set(COLUMNS):
        if near := get_close_matches(name, COLUMNS, 1, 0.8):
            raise ValueError(f"{path}: the column {name} is unknown; did you mean {near[0]}?")
    for name in REQUIRED[4:] if "model" in rows[0] else REQUIRED:
        if name not in rows[0]:
            known = ", ".join(COLUMNS)
            raise ValueError(f"{path}: the column {name} is missing; a table has {known}")
    return rows


class Cells(dict[str, str]):
    """What a row says, in this project's words; without the cells that say nothing."""

    def __init__(self, row: Row) -> None:
        if row.get(MORE, "").strip():
            raise ValueError("it has more cells than the header; a cell with a comma needs quotes")
        for name, cell in row.items():
            # pandas writes 2.0 for 2 where another cell of the column is empty
            text = re.sub("[ _]", "-", cell.strip().lower().removesuffix(".0"))
            text = SPELLINGS.get(text, text)
            if text not in SILENT:
                self[name] = SPELLINGS.get(f"{name} {text}", text)

    def number(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number."""
        if (text := self.get(name)) is None:
            if default is None:
                raise ValueError(f"{name} is empty")
            return default
        if not (found := as_number(text)).is_integer():
            raise ValueError(f"{name} is {text!r}, and must be a whole number")
        if found < least:
            raise ValueError(f"{name} is {found:g}, and must be {least} or more")
        return int(found)

    def word(self, name: str, default: str, known: Iterable[str]) -> str:
        """One of the known words."""
        if (text := self.get(name, default)) not in known:
            raise ValueError(f"{name} is {text!r}, and must be one of {', '.join(known)}")
        return text

    def fields(self, hints: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a model or layout that the row has."""
        found: dict[str, Any] = {}
        for name in filter(self.__contains__, hints):
            if known := choices(hints[name]):
                found[name] = type(known[0])(self.word(name, "", [str(word) for word in known]))
            else:
                may_be_0 = hints[name] is bool or name == "chunks"
                found[name] = self.number(name, least=0 if may_be_0 else 1)
        return found

    def measured(self, name: str) -> float | None:
        """What was measured; None if nothing was, or the run ended out of memory."""
        text = self.get(name, "oom")
        if text in ("oom", "0"):
            return None
        if not 0 < (found := as_number(text)) < math.inf:
            raise ValueError(f"{name} is {text!r}, and must be a number above 0, empty, or oom")
        return found

    def fits(self) -> bool | None:
        """Whether the run had enough memory; None if it is not said."""
        if "oom" in (self.get("fits"), self.get("seconds_per_step"), self.get("memory_gb")):
            return False
        return self.word("fits", "", ("1", "0")) == "1" if "fits" in self else None


def row_of(row: Row, machine: Machine) -> tuple[Model, Layout, Machine]:
    """The model, layout and nodes of a row."""
    cells = Cells(row)
    preset = cells.get("model")
    if preset not in MODELS and "layers" in cells:  # a name of its own
        preset = None
    model = model_of(preset, **({} if preset else {"vocab": 51200}) | cells.fields(SIZES))
    given = {"precision": "bf16" if "bf16" in machine.tflops else "fp16"} | cells.fields(LAYOUT)
    layout = layout_of(**given, batch_size=cells.number("global_batch"), order="pp-dp-tp")
    pp, chunks = layout.pp, layout.chunks
    if layout.schedule == "interleaved" and not chunks:
        units = model.layers  # or embedding and head as a block each
        units += 0 if units % pp == 0 else 2
        chunks = next((c for c in range(2, units // pp + 1) if units % (pp * c) == 0), 1)
    several = pp > 1 and (chunks or 1) > 1
    if layout.schedule in ("interleaved", "1f1b"):  # which of them, the chunks say
        layout = replace(layout, schedule="interleaved" if several else "1f1b")
    layout = replace(layout, chunks=chunks if layout.schedule == "interleaved" else None)
    # ZeRO-2 and 3 are torch's with fused kernels, and gated MLPs came with fused attention.
    attention = "flash" if layout.zero > 1 or model.gated_mlp else machine.attention
    loss = cells.word("loss", "fused" if layout.zero > 1 else machine.loss, LOGITS)
    nodes = machine.with_nodes(cells.number("gpus_per_node", machine.gpus_per_node))
    nodes = replace(nodes, attention=attention, loss=loss)
    if layout.schedule == "interleaved":  # Megatron-LM's: equal stages, inputs gathered again
        nodes = replace(nodes, balance="uniform", gathered="again")
    return model, layout, nodes


def compared(table: Sequence[Row], machine: Machine) -> list[dict[str, Any]]:
    """Each row of a table with its prediction. Of a row that has none, `problem` says why, and what
    is not known is None. Raises ValueError, with the first problem, if all rows have one."""
    found = []
    for k, row in enumerate(table, 1):
        own: dict[str, Any] = {name: row.get(name, "") for name in COLUMNS}
        own |= dict.fromkeys((*MEASURED, *PREDICTED, "problem"))
        try:
            cells = Cells(row)
            own |= {name: cells.measured(name) for name in MEASURED[:2]} | {"fits": cells.fits()}
            model, layout, nodes = row_of(row, machine)
            own |= asdict(model) | {"gpus": layout.gpus, "global_batch": layout.batch_size}
            step = PricedStep(model, layout, nodes, legal=False)
            own |= zip(PREDICTED, (step.seconds, step.memory_gb, step.fits), strict=True)
        except ValueError as error:
            own["problem"] = f"row {k}: {error}"
        found.append(own)
    if all(row["problem"] for row in found):
        raise ValueError(found[0]["problem"])
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The errors of a table: of time and memory, mean and worst; the share of pairs of layouts of
    the same model, GPUs and batch whose order is right; regret, the seconds that the layout
    predicted to be the fastest takes more than the fastest; the share of rows that fit or not as
    predicted. Rows with a problem do not count."""
    rows = [row for row in rows if not row["problem"]]
    found: dict[str, float] = {"rows": len(rows)}
    for what, name, ours in zip(("time", "memory"), MEASURED[:2], PREDICTED[:2], strict=True):
        if errors := [abs(row[ours] / row[name] - 1) for row in rows if row[name]]:
            found |= {f"{what}_error": fmean(errors), f"{what}_worst": max(errors)}
    groups: defaultdict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["seconds_per_step"]:
            key = tuple(row[name] for name in (*SIZES, "gpus", "global_batch"))
            groups[key].append((row["seconds_per_step"], row["predicted_seconds"]))
    alike = [group for group in groups.values() if len(group) > 1]
    pairs = [(a, b) for group in alike for a, b in combinations(group, 2) if a[0] != b[0]]
    if pairs:
        chosen = [min(group, key=lambda run: run[1])[0] / min(group)[0] - 1 for group in alike]
        found["pairs_in_order"] = fmean((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
        found |= {"regret": fmean(chosen), "regret_worst": max(chosen)}
    if known := [row for row in rows if row["fits"] is not None]:
        found["fits_right"] = fmean(row["fits"] == row["predicted_fits"] for row in known)
    return found
