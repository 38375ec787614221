"""What a prediction is about: a model, its layout over GPUs, and a machine. Read from options, from
the rows of a table of measured runs, and from small YAML files.

Every mistake is a ValueError of one sentence with the value, the rule, and what works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pipeline.schedules.catalogue import SCHEDULES, chunks_of

MACHINES = Path(__file__).parent / "machines"
PRESETS = {  # layers, hidden, heads, vocabulary, positions
    "gpt2-mini": (4, 256, 4, 4096, 128),
    "gpt2": (12, 768, 12, 50257, 1024),
    "gpt2-medium": (24, 1024, 16, 50257, 1024),
    "gpt2-large": (36, 1280, 20, 50257, 1024),
    "gpt2-xl": (48, 1600, 25, 50257, 1024),
}
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
NETWORKS = {  # GB/s of a node, seconds of a message in us: line rates
    "ethernet-10": (1.25, 30), "ethernet-25": (3.1, 30), "ethernet-100": (12.5, 20),
    "infiniband-100": (12.5, 5), "infiniband-8x200": (200, 10), "infiniband-8x400": (400, 10),
}  # fmt: skip
LINKS = {"pcie3": 16.0, "pcie4": 32.0, "pcie5": 64.0}  # GB/s of a GPU, one way: line rates


@dataclass(frozen=True)
class Model:
    """A transformer. ``ffn``: width of the MLP; ``gated_mlp``: it has two matrices up, not one."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    gated_mlp: bool = False
    tied: bool = True

    @cached_property
    def block(self) -> int:
        """Parameters of a block, without biases and norms."""
        return (4 * self.hidden + (2 + self.gated_mlp) * self.ffn) * self.hidden

    @property
    def table(self) -> int:
        """Parameters of an embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.block + (1 if self.tied else 2) * self.table

    def flops(self, sequences: int) -> float:
        """Of the model's arithmetic in a step, recomputation not counted: attention looks back
        only, so that half of its products count."""
        block = 2 * self.block + 2 * self.seq * self.hidden
        return 3.0 * sequences * self.seq * (self.layers * block + 2 * self.table)


@dataclass(frozen=True)
class Layout:
    """How a step is laid out. Its options are those of train.py.

    ``order``: which ranks are neighbours, outermost first. Tensor is always innermost: train.py has
    replicas outermost (dp-pp-tp), Megatron-LM and nanotron have stages outermost (pp-dp-tp).
    """

    gpus: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batch: int = 1
    batch_size: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "never"
    precision: str = "bf16"
    order: str = "dp-pp-tp"

    @property
    def num_microbatches(self) -> int:
        """Of a replica, in a step."""
        return -(-self.batch_size // (self.dp * self.micro_batch))

    @cached_property
    def stages(self) -> int:
        """Of the model: ranks times chunks."""
        return self.pp * (chunks_of(self.schedule, self.chunks) if self.pp > 1 else 1)

    def check(self, model: Model) -> None:
        """Raises ValueError if it cannot run."""
        named = f"--dp {self.dp} --pp {self.pp} --tp {self.tp}"
        if self.dp * self.pp * self.tp != self.gpus:
            raise ValueError(
                f"{named} --gpus {self.gpus}: dp x pp x tp is {self.dp * self.pp * self.tp}; "
                f"--gpus {self.dp * self.pp * self.tp} works"
            )
        per = self.dp * self.micro_batch
        if self.batch_size % per:
            more = -(-self.batch_size // per) * per
            raise ValueError(
                f"--batch_size {self.batch_size} --dp {self.dp} --micro_batch {self.micro_batch}: "
                f"every replica has whole micro-batches; --batch_size {more} works"
            )
        if self.sequence_parallel and model.seq % self.tp:
            raise ValueError(
                f"--sequence_parallel --seq {model.seq} --tp {self.tp}: ranks have equal parts; "
                f"--seq {-(-model.seq // self.tp) * self.tp} works"
            )
        if self.stages > model.layers:
            raise ValueError(
                f"--pp {self.pp} --schedule {self.schedule}: {self.stages} stages need as many "
                f"blocks, and the model has {model.layers}; fewer stages work"
            )
        if self.zero > 1 and self.pp > 1:
            raise ValueError(
                f"--zero {self.zero} --pp {self.pp}: every micro-batch would exchange all "
                "gradients; --zero 1, or --pp 1, works"
            )


@dataclass(frozen=True)
class Machine:
    """A cluster, and how well the software that it was calibrated with uses it. A file may begin
    with ``like: NAME`` and change some of these."""

    name: str
    source: str
    gpus_per_node: int
    memory_gb: float  # GiB of a GPU
    tflops: Mapping[str, float]  # dense, by precision
    memory_gbs: float  # GB/s
    link_gbs: float  # GB/s that a GPU sends inside its node
    network_gbs: float  # GB/s that a node sends
    # The constants of the model: docs/planning.md says what each means and where it comes from.
    matmul_efficiency: float
    memory_efficiency: float
    kernel_us: float
    host_us: float
    link_efficiency: float
    link_us: float
    network_efficiency: float
    network_us: float
    collective_us: float
    message_us: float
    step_ms: float
    overlap: float
    reserve_gb: float
    attention: str  # flash or unfused
    balance: str  # of stages: uniform or auto
    gathered: str  # what sequence parallelism gathers for the matrices: kept for backward, or again

    def per_second(self, precision: str) -> float:
        """FLOP/s of large matrix products."""
        if precision not in self.tflops:
            raise ValueError(
                f"--precision {precision}: {self.name} has no figure for it; "
                f"{' or '.join(self.tflops)} works"
            )
        return self.tflops[precision] * 1e12 * self.matmul_efficiency

    @property
    def memory_per_second(self) -> float:
        """Bytes that kernels read and write."""
        return self.memory_gbs * 1e9 * self.memory_efficiency

    def shared(self, ranks: int) -> Machine:
        """One node whose cores these ranks share, if they are more."""
        part = min(1.0, self.gpus_per_node / ranks)
        return replace(
            self, gpus_per_node=max(ranks, self.gpus_per_node), memory_gbs=self.memory_gbs * part,
            tflops={name: value * part for name, value in self.tflops.items()},
        )  # fmt: skip


def machine(name: str, network: str | None = None, link: str | None = None) -> Machine:
    """The machine of a YAML file, or of `machines/`, by its name; with another network, a name or
    GB/s of a node, or other links, a name or GB/s of a GPU. ValueError if there is none."""
    found = _read(name)
    if network is not None:
        found["network_gbs"], found["network_us"] = NETWORKS.get(
            network, (_gbs("network", network, NETWORKS), found.get("network_us"))
        )
    if link is not None:
        found["link_gbs"] = LINKS.get(link) or _gbs("link", link, LINKS)
    known = {field.name for field in fields(Machine)}
    if unknown := sorted(found.keys() - known):
        near = get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}: {unknown[0]} is no figure of a machine{hint}")
    if missing := sorted(known - found.keys()):
        raise ValueError(
            f"{name}: {', '.join(missing)} missing; `like: a100-80gb` takes them from another"
        )
    for field in fields(Machine):
        if field.type == "float" and not isinstance(found[field.name], int | float):
            raise ValueError(f"{name}: {field.name} is {found[field.name]!r}, and must be a number")
    return Machine(**found)


def _gbs(option: str, given: str, known: Mapping[str, Any]) -> float:
    if given not in known and (not _is_number(given) or float(given) <= 0):
        raise ValueError(f"--{option} {given}: GB/s, or one of {', '.join(known)}")
    return 0.0 if given in known else float(given)


def _read(name: str, *before: str) -> dict[str, Any]:
    """The figures of a machine; `before`: the one that is `like` it, and so on."""
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else MACHINES / f"{name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in MACHINES.glob("*.yaml"))
        raise ValueError(
            f"--machine {name}: it is neither a YAML file nor one of {', '.join(known)}"
        )
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"--machine {name}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--machine {name}: a machine is a list of `figure: value`")
    like = found.pop("like", None)
    if like in (name, *before):
        raise ValueError(
            f"--machine {name}: `like: {like}` leads back to it; `like: a100-80gb` works"
        )
    base = {} if like is None else _read(like, name, *before)
    return base | {"name": path.stem} | found


def model_of(preset: str | None, **sizes: Any) -> Model:
    """A preset, with the sizes that are given in place of its own, or a model of sizes alone."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"--model {preset}: one of {', '.join(PRESETS)}, or sizes instead")
        layers, hidden, heads, vocab, seq = PRESETS[preset]
        known = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "seq": seq}
        given = known | given
    if missing := [
        name for name in ("layers", "hidden", "heads", "vocab", "seq") if name not in given
    ]:
        raise ValueError(
            f"{', '.join(missing)} missing: a model is a --model, or all of --n_layer --n_embd "
            "--n_head --vocab_size --seq"
        )
    model = Model(**{"ffn": 4 * given["hidden"]} | given)
    if model.hidden % model.heads:
        raise ValueError(f"--n_embd {model.hidden} --n_head {model.heads}: heads are equally wide")
    return model


COLUMNS = (
    "layers", "hidden", "heads", "ffn", "gated_mlp", "vocab", "tied", "seq", "gpus",
    "gpus_per_node", "dp", "tp", "pp", "chunks", "micro_batch", "global_batch", "schedule", "zero",
    "sequence_parallel", "recompute", "precision", "seconds_per_step", "memory_gb", "fits",
)  # fmt: skip
REQUIRED = ("layers", "hidden", "heads", "vocab", "seq", "gpus", "global_batch")
SPELLINGS = {  # of columns, and of words in them
    "n_layer": "layers", "n_embd": "hidden", "n_head": "heads", "vocab_size": "vocab",
    "batch_size": "global_batch", "none": "never", "full": "always", "afab": "gpipe",
    "zb-h1": "zb", "zb-1p": "zb", "zb-v": "zbv", "1f1b-i": "interleaved",
    "true": "1", "yes": "1", "false": "0", "no": "0",
}  # fmt: skip


def row_of(row: Mapping[str, str], machine: Machine) -> tuple[Model, Layout, Machine]:
    """The model, layout and nodes of a row of a table. Where a table is silent: one sequence per
    micro-batch, as many replicas as there are GPUs for, the fewest chunks, 2 or more, that cut a
    stage's blocks evenly, no recomputation, bf16.

    Raises ValueError for a cell that has no meaning."""

    def number(name: str, default: int | None = None) -> int:
        text = SPELLINGS.get(said(name, ""), said(name, ""))
        if not text and default is not None:
            return default
        if not _is_number(text) or float(text) < 0:
            raise ValueError(
                f"{name} is {text!r}, and must be a number" if text else f"{name} is empty"
            )
        return int(float(text))

    def said(name: str, default: str) -> str:
        text = (row.get(name) or "").strip().lower() or default
        return SPELLINGS.get(text, text)

    layers, hidden, heads, vocab, seq, gpus, batch = map(number, REQUIRED)
    model = Model(
        layers, hidden, heads, number("ffn", 4 * hidden), vocab, seq,
        gated_mlp=bool(number("gated_mlp", 0)), tied=bool(number("tied", 1)),
    )  # fmt: skip
    tp, pp, schedule = number("tp", 1), number("pp", 1), said("schedule", "1f1b")
    chunks = number("chunks", 0)
    if schedule == "interleaved" and not chunks:
        blocks = layers // pp
        chunks = next((c for c in range(2, blocks + 1) if blocks % c == 0), 1)
    if schedule in ("interleaved", "1f1b"):  # more than one chunk is interleaved, whatever it says
        schedule = "interleaved" if chunks > 1 and pp > 1 else "1f1b"
    recompute, precision = said("recompute", "never"), said("precision", "bf16")
    for name, word, known in (
        ("schedule", schedule, tuple(SCHEDULES)),
        ("recompute", recompute, ("never", "selective", "always")),
        ("precision", precision, tuple(machine.tflops)),
    ):
        if word not in known:
            raise ValueError(f"{name} is {word!r}, and must be one of {', '.join(known)}")
    dp, zero = number("dp", gpus // (tp * pp)), number("zero", 0)
    if dp * tp * pp != gpus:
        raise ValueError(f"dp {dp} x tp {tp} x pp {pp} is {dp * tp * pp}, and gpus is {gpus}")
    layout = Layout(
        gpus, dp, tp, pp, number("micro_batch", 1), batch, schedule,
        chunks if schedule == "interleaved" else None, zero,
        bool(number("sequence_parallel", 0)), recompute, precision, "pp-dp-tp",
    )  # fmt: skip
    per = number("gpus_per_node", machine.gpus_per_node)  # a GPU keeps its part of the network
    share = machine.network_gbs * per / machine.gpus_per_node
    software = "flash" if zero > 1 else machine.attention  # ZeRO-2 and 3 are torch's: fused
    nodes = replace(machine, gpus_per_node=per, network_gbs=share, attention=software)
    return model, layout, nodes


def _is_number(text: str | None) -> bool:
    try:
        float(text or "")
    except ValueError:
        return False
    return True
