"""What a prediction is about: a model, its layout over GPUs, and a machine. Read from options, from
the rows of a table of measured runs, and from small YAML files.

Every mistake is a ValueError of one sentence with the value, the rule, and what works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pipeline.schedules.catalogue import SCHEDULES, chunks_of

MACHINES = Path(__file__).parent / "machines"
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
NETWORKS = {  # GB/s of a node, seconds of a message in us: line rates
    "ethernet-10": (1.25, 30), "ethernet-25": (3.1, 30), "ethernet-100": (12.5, 20),
    "infiniband-100": (12.5, 5), "infiniband-8x200": (200, 10), "infiniband-8x400": (400, 10),
}  # fmt: skip
LINKS = {"pcie3": 16.0, "pcie4": 32.0, "pcie5": 64.0}  # GB/s of a GPU, one way: line rates


@dataclass(frozen=True)
class Model:
    """A transformer. ``ffn``: width of the MLP; ``gated_mlp``: it has two matrices up, not one;
    ``kv_heads``: of keys and values, if queries share them (None: as many as ``heads``)."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    gated_mlp: bool = False
    tied: bool = True
    kv_heads: int | None = None

    @property
    def kv_share(self) -> float:
        """The width of keys, or of values, as a share of that of queries."""
        return (self.kv_heads or self.heads) / self.heads

    @cached_property
    def block(self) -> int:
        """Parameters of a block, without biases and norms."""
        attention = round((2 + 2 * self.kv_share) * self.hidden)
        return (attention + (2 + self.gated_mlp) * self.ffn) * self.hidden

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


PRESETS = {
    "gpt2-mini": Model(4, 256, 4, 1024, 4096, 128),
    "gpt2": Model(12, 768, 12, 3072, 50257, 1024),
    "gpt2-medium": Model(24, 1024, 16, 4096, 50257, 1024),
    "gpt2-large": Model(36, 1280, 20, 5120, 50257, 1024),
    "gpt2-xl": Model(48, 1600, 25, 6400, 50257, 1024),
    "gpt3-175b": Model(96, 12288, 96, 49152, 51200, 2048),
    "llama-2-7b": Model(32, 4096, 32, 11008, 32000, 4096, gated_mlp=True, tied=False),
    "llama-3-8b": Model(32, 4096, 32, 14336, 128256, 8192, True, False, kv_heads=8),
    "llama-3-70b": Model(80, 8192, 64, 28672, 128256, 8192, True, False, kv_heads=8),
    "llama-3-405b": Model(126, 16384, 128, 53248, 128256, 8192, True, False, kv_heads=8),
}


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
    """A preset, with the sizes that are given in place of its own, or a model of sizes alone. The
    MLP is 4 times as wide as the model, unless the preset or the sizes say otherwise."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"--model {preset}: one of {', '.join(PRESETS)}, or sizes instead")
    known = asdict(PRESETS[preset]) if preset is not None else {}
    if "hidden" in given:
        known["ffn"] = 4 * given["hidden"]
    given = known | given
    if missing := [
        name for name in ("layers", "hidden", "heads", "vocab", "seq") if name not in given
    ]:
        raise ValueError(
            f"{', '.join(missing)} missing: a model is a --model, or all of --n_layer --n_embd "
            "--n_head --vocab_size --seq"
        )
    model = Model(**given)
    if model.hidden % model.heads:
        raise ValueError(f"--n_embd {model.hidden} --n_head {model.heads}: heads are equally wide")
    if model.kv_heads and model.heads % model.kv_heads:
        raise ValueError(
            f"--kv_heads {model.kv_heads} --n_head {model.heads}: as many queries share each; "
            f"--kv_heads {math.gcd(model.kv_heads, model.heads)} works"
        )
    return model


REQUIRED = ("layers", "hidden", "heads", "seq", "global_batch")  # or a model, and global_batch
COLUMNS = (
    "model", "layers", "hidden", "heads", "kv_heads", "ffn", "gated_mlp", "vocab", "tied", "seq",
    "gpus", "gpus_per_node", "dp", "tp", "pp", "chunks", "micro_batch", "global_batch", "schedule",
    "zero", "sequence_parallel", "recompute", "precision", "seconds_per_step", "memory_gb", "fits",
)  # fmt: skip
SPELLINGS = {  # of columns, and of words in them
    "n_layer": "layers", "n_embd": "hidden", "n_head": "heads", "n_kv_head": "kv_heads",
    "vocab_size": "vocab", "model_max_length": "seq", "batch_size": "global_batch",
    "none": "never", "full": "always", "afab": "gpipe",
    "zb-h1": "zb", "zb-1p": "zb", "zb-v": "zbv", "1f1b-i": "interleaved",
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32",
    "true": "1", "yes": "1", "false": "0", "no": "0",
}  # fmt: skip
SILENT = ("", "-", "?", "na", "n/a", "nan", "null", "unknown")  # a cell that says nothing


def word_in(row: Mapping[str, str], name: str) -> str:
    """What a cell says, in this project's words; nothing if it is silent."""
    text = (row.get(name) or "").strip().lower()
    return "" if text in SILENT else SPELLINGS.get(text, text)


def measured_in(row: Mapping[str, str], name: str) -> float | None:
    """The number of a cell; None if it is silent, or out of memory. Raises ValueError."""
    text = word_in(row, name)
    if text in ("", "oom", "0"):
        return None
    if not _is_number(text) or not 0 < float(text) < math.inf:
        raise ValueError(f"{name} is {text!r}, and must be a number above 0, empty, or oom")
    return float(text)


def row_of(row: Mapping[str, str], machine: Machine) -> tuple[Model, Layout, Machine]:
    """The model, layout and nodes of a row of a table. Where a table is silent: a vocabulary of
    51,200, one sequence per micro-batch, as many replicas as there are GPUs for, the fewest chunks,
    2 or more, that cut a stage's blocks evenly, no recomputation, 16 bits.

    Raises ValueError for a cell that has no meaning."""

    def number(name: str, default: int | None = None, least: int = 1) -> int:
        text = word_in(row, name)
        if text in ("", "never") and default is not None:
            return default
        if not _is_number(text) or not float(text).is_integer():
            raise ValueError(
                f"{name} is {text!r}, and must be a whole number" if text else f"{name} is empty"
            )
        if (found := int(float(text))) < least:
            raise ValueError(f"{name} is {found}, and must be {least} or more")
        return found

    preset = PRESETS.get(word_in(row, "model"))
    layers, hidden, heads, seq = (
        number(name, getattr(preset, name) if preset else None) for name in REQUIRED[:4]
    )
    plain = preset or Model(layers, hidden, heads, 4 * hidden, 51200, seq)
    model = Model(
        layers, hidden, heads, number("ffn", plain.ffn), number("vocab", plain.vocab), seq,
        gated_mlp=bool(number("gated_mlp", plain.gated_mlp, 0)),
        tied=bool(number("tied", plain.tied, 0)),
        kv_heads=number("kv_heads", plain.kv_heads or heads),
    )  # fmt: skip
    tp, pp, schedule = number("tp", 1), number("pp", 1), word_in(row, "schedule") or "1f1b"
    chunks = number("chunks", 0, 0)
    if schedule == "interleaved" and not chunks:
        units = layers if layers % pp == 0 else layers + 2  # embedding and head as a block each
        chunks = next((c for c in range(2, units // pp + 1) if units % (pp * c) == 0), 1)
    if schedule in ("interleaved", "1f1b"):  # more than one chunk is interleaved, whatever it says
        schedule = "interleaved" if chunks > 1 and pp > 1 else "1f1b"
    recompute, zero = word_in(row, "recompute") or "never", number("zero", 0, 0)
    precision = word_in(row, "precision") or ("bf16" if "bf16" in machine.tflops else "fp16")
    for name, word, known in (
        ("schedule", schedule, tuple(SCHEDULES)),
        ("recompute", recompute, ("never", "selective", "always")),
        ("precision", precision, tuple(machine.tflops)),
        ("zero", str(zero), ("0", "1", "2", "3")),
    ):
        if word not in known:
            raise ValueError(f"{name} is {word!r}, and must be one of {', '.join(known)}")
    dp = number("dp", number("gpus", 1) // (tp * pp) or 1)
    gpus = number("gpus", dp * tp * pp)
    if dp * tp * pp != gpus:
        raise ValueError(f"dp {dp} x tp {tp} x pp {pp} is {dp * tp * pp}, and gpus is {gpus}")
    layout = Layout(
        gpus, dp, tp, pp, number("micro_batch", 1), number("global_batch"), schedule,
        chunks if schedule == "interleaved" else None, zero,
        bool(number("sequence_parallel", 0, 0)), recompute, precision, "pp-dp-tp",
    )  # fmt: skip
    per = number("gpus_per_node", machine.gpus_per_node)  # a GPU keeps its part of the network
    share = machine.network_gbs * per / machine.gpus_per_node
    # ZeRO-2 and 3 are torch's, and gated MLPs came with fused attention.
    software = "flash" if zero > 1 or model.gated_mlp else machine.attention
    nodes = replace(machine, gpus_per_node=per, network_gbs=share, attention=software)
    return model, layout, nodes


def _is_number(text: str | None) -> bool:
    try:
        float(text or "")
    except ValueError:
        return False
    return True
