"""What a prediction is about: a model, its layout over GPUs, and a machine, which is a small YAML
file.

A user's mistake raises ValueError, with one sentence: the value, the rule, and what works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import yaml

from pipeline.schedules.catalogue import SCHEDULES, chunks_of

RANKS = ("dp", "cp", "pp", "tp")  # the fields of a layout whose product is its GPUs

MACHINES = Path(__file__).parent / "machines"
BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
TRAIN_NAMES = {  # of options in train.py
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "kv_heads": "n_kv_head",
    "vocab": "vocab_size", "seq": "model_max_length",
}  # fmt: skip
Figures = dict[str, Any]  # of a machine
Lines = Mapping[str, tuple[float, ...]]
NETWORKS: Lines = {  # GB/s of a node, at the line rate; us per message
    "ethernet-10": (1.25, 30), "ethernet-25": (3.1, 30), "ethernet-100": (12.5, 20),
    "infiniband-100": (12.5, 5), "infiniband-8x200": (200, 10), "infiniband-8x400": (400, 10),
}  # fmt: skip
LINKS: Lines = {"pcie3": (16,), "pcie4": (32,), "pcie5": (64,)}  # GB/s of a GPU, one way


@dataclass(frozen=True)
class Model:
    """A transformer. Its fields and those of a layout are options of plan.py, and columns of a
    table of measured runs."""

    layers: int
    """blocks"""
    hidden: int
    """width"""
    heads: int
    """attention heads"""
    ffn: int
    """width of the MLP; default: 4 times the model's"""
    vocab: int
    """tokens of the vocabulary"""
    seq: int
    """tokens per sequence"""
    gated_mlp: bool = False
    """the MLP has a gate, as in Llama: three matrices, not two"""
    tied: bool = True
    """the head has the embedding's weights; default: true, except for Llama"""
    kv_heads: int | None = None
    """heads of keys and values; default: as many as heads"""
    experts: int = 1
    """MLPs of a block, among which a router chooses; default: 1"""
    top_k: int = 1
    """experts that compute each position; default: 1"""

    @property
    def kv_share(self) -> float:
        """The width of keys, or of values, as a share of that of queries."""
        return (self.kv_heads or self.heads) / self.heads

    @cached_property
    def attention(self) -> int:
        """Parameters of a block's attention, without biases and norms."""
        return round((2 + 2 * self.kv_share) * self.hidden) * self.hidden

    @cached_property
    def mlp(self) -> int:
        """Parameters of a block's MLP, or of one of its experts."""
        return (2 + self.gated_mlp) * self.ffn * self.hidden

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return self.attention + self.experts * self.mlp

    @property
    def table(self) -> int:
        """Parameters of an embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights of matrices. Positions, norms and biases, 0.2 % of GPT-2 XL, are left out."""
        return self.layers * self.block + (1 if self.tied else 2) * self.table

    def flops(self, sequences: int) -> float:
        """Operations of the model in a step, without recomputation. Attention only looks back, so
        half of its products count."""
        block = 2 * (self.attention + self.top_k * self.mlp) + 2 * self.seq * self.hidden
        return 3.0 * sequences * self.seq * (self.layers * block + 2 * self.table)


MODELS = {
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
    """How a step is laid out. Its options are those of train.py. `dp` counts all replicas; groups
    of `ep` of them share the experts.

    `order`: the axes, outermost first; ranks on the last one are neighbours. tp is always last:
    train.py has replicas outermost (dp-pp-tp), Megatron-LM and nanotron stages (pp-dp-tp).
    """

    gpus: int
    """default in predict: dp x cp x pp x tp, in search: one node"""
    dp: int = 1
    """replicas"""
    cp: int = 1
    """parts of every sequence"""
    pp: int = 1
    """ranks of a pipeline"""
    tp: int = 1
    """parts of every matrix"""
    ep: int = 1
    """replicas that share the experts; divides dp"""
    attention: Annotated[str, ("ring", "heads")] = "ring"
    """how parts of a sequence attend to each other; default in predict: ring"""
    micro_batch: int = 1
    """sequences per micro-batch"""
    batch_size: int = 1
    """sequences per step, over all GPUs; required"""
    schedule: Annotated[str, tuple(name for name in SCHEDULES if name != "sequential")] = "1f1b"
    """order of a pipeline's work; default in predict: 1f1b"""
    chunks: int | None = None
    """stages per rank, of interleaved"""
    zero: Annotated[int, (0, 1, 2, 3)] = 0
    """what replicas divide: 1 optimizer state, 2 also gradients, 3 also parameters; default in
    predict: 0"""
    recompute: Annotated[str, ("never", "selective", "always")] = "never"
    """compute activations again in backward; selective: only attention's; default in predict:
    never"""
    precision: Annotated[str, tuple(BYTES)] = "bf16"
    """default: bf16"""
    sequence_parallel: bool = False
    """split the positions, too, outside the cut matrices"""
    shards: int | None = None
    """replicas that share one copy under ZeRO, such as those of a node; divides dp; default: all"""
    order: str = "dp-pp-tp"

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches a replica has in a step."""
        return -(-self.batch_size // (self.dp * self.micro_batch))

    @cached_property
    def stages(self) -> int:
        """The number of stages: ranks times chunks."""
        return self.pp * (chunks_of(self.schedule, self.chunks) if self.pp > 1 else 1)

    @property
    def copies(self) -> int:
        """How many ranks have the same parameters, except for experts."""
        return self.dp * self.cp

    @property
    def sharing(self) -> int:
        """How many of these ranks share one copy in shards, or could under ZeRO."""
        return (self.shards or self.dp) * self.cp

    @property
    def stride(self) -> int:
        """The distance from a rank to the one that has the next positions."""
        return self.tp * (1 if self.order == "pp-dp-tp" else self.pp)

    def nodes(self, most: int) -> int:
        """The fewest nodes of at most `most` GPUs that share the GPUs equally. Raises ValueError if
        these are more than twice as many nodes as could hold them."""
        fewest = -(-self.gpus // most)
        nodes = min(n for n in divisors(self.gpus) if n >= fewest)
        if nodes > 2 * fewest:
            raise ValueError(
                f"gpus {self.gpus}: nodes of {most} cannot share them equally; "
                f"{fewest * most} works"
            )
        return nodes

    def check(self, model: Model) -> None:
        """Raises ValueError if the layout cannot run this model."""
        per, heads, shared = self.dp * self.micro_batch, model.heads, model.kv_heads or model.heads
        shards = self.shards or self.ep
        rules = (  # the options, whether they fulfil the rule, the rule, what works
            ("hidden heads", model.hidden % heads == 0, "heads are equally wide",
             f"--n_embd {_up(model.hidden, heads)} works"),
            ("kv_heads heads", heads % shared == 0, "equally many queries share each",
             f"--n_kv_head {math.gcd(shared, heads)} works"),
            ("batch_size dp micro_batch", self.batch_size % per == 0,
             "every replica must have whole micro-batches",
             f"--batch_size {_up(self.batch_size, per)} works"),
            ("pp schedule layers", self.stages <= model.layers,
             f"{self.stages} stages need as many blocks", "fewer stages work"),
            ("attention cp tp heads", self.attention == "ring" or heads % (self.cp * self.tp) == 0,
             "ranks have whole heads", "--attention ring works"),
            ("ep experts dp", model.experts % self.ep == 0 and self.dp % self.ep == 0,
             "ranks have equally many experts", f"--ep {math.gcd(model.experts, self.dp)} works"),
            ("shards dp ep", self.dp % shards == 0 and shards % self.ep == 0,
             "the replicas form groups of this size, each with all experts",
             f"--shards {self.dp} works"),
            ("shards", self.shards is None or self.zero > 0,
             "without --zero every replica has a whole copy", "--zero 1 works"),
            ("top_k experts", 1 <= model.top_k <= model.experts,
             "a position cannot have more experts than there are",
             f"--top_k {model.experts} works"),
            ("zero pp", self.zero < 2 or self.pp == 1,
             "every micro-batch would exchange all gradients", "--zero 1, or --pp 1, works"),
        )  # fmt: skip
        for names, fulfilled, rule, instead in rules:
            if not fulfilled:
                values = vars(model) | vars(self)
                given = ((TRAIN_NAMES.get(name, name), values[name]) for name in names.split())
                words = " ".join(f"--{name} {value}" for name, value in given)
                raise ValueError(f"{words}: {rule}; {instead}")


def divisors(number: int) -> list[int]:
    """All numbers that divide it, from 1 on."""
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def _up(number: int, of: int) -> int:
    """The smallest multiple of `of` that is not below the number."""
    return -(-number // of) * of


@dataclass(frozen=True)
class Machine:
    """A cluster, and how well the software that it was calibrated with uses it. A file may begin
    with `like: NAME` and change some figures of that machine."""

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
    slices_us: float  # to copy one replica's part of a block that ZeRO-1 has gathered
    collective_us: float
    staged_us: float  # added to collective_us per rank of tp, if stages are on several nodes
    skew: float  # the part of its work by which the last rank of tp is later than the mean
    step_ms: float
    # What overlaps with computation; each word includes those before it. zero: collectives of
    # ZeRO-2 and 3; gradients: their exchange, and messages between stages; all: ZeRO-1's gathering.
    overlap: Annotated[str, ("nothing", "zero", "gradients", "all")]
    reserve_gb: float
    second_gradient: float  # bytes per parameter under bf16, in addition to its gradient in fp32
    # Of runs that were kept out of the fit: the error that two of three stayed within, and the most
    # nodes; 0 if there were none. `like` does not copy these two.
    error: float
    measured_nodes: int
    attention: Annotated[str, ("flash", "unfused")]
    loss: Annotated[str, ("fused", "plain")]
    balance: Annotated[str, ("uniform", "auto")]  # of stages
    gathered: Annotated[str, ("kept", "again")]  # for backward: what sequence parallelism gathers

    def per_second(self, precision: str) -> float:
        """FLOP/s of large matrix products. A machine without TF32 computes it as fp32."""
        if precision == "tf32" and precision not in self.tflops:
            precision = "fp32"
        if precision not in self.tflops:
            raise ValueError(
                f"--precision {precision}: {self.name} has no figure for it; "
                f"{' or '.join(self.tflops)} works"
            )
        return self.tflops[precision] * 1e12 * self.matmul_efficiency

    @property
    def memory_per_second(self) -> float:
        """Bytes that kernels read and write in a second."""
        return self.memory_gbs * 1e9 * self.memory_efficiency

    def with_nodes(self, gpus: int) -> Machine:
        """The machine with nodes of `gpus` GPUs, each GPU with its part of the network."""
        share = self.network_gbs * gpus / self.gpus_per_node
        return replace(self, gpus_per_node=gpus, network_gbs=share)

    def shared(self, ranks: int) -> Machine:
        """One node whose cores `ranks` ranks share. If there are more ranks than cores, they
        compute, copy and answer each other in turns."""
        part = min(1.0, self.gpus_per_node / ranks)
        return replace(
            self, gpus_per_node=max(ranks, self.gpus_per_node), memory_gbs=self.memory_gbs * part,
            tflops={name: value * part for name, value in self.tflops.items()},
            link_gbs=self.link_gbs * part, link_us=self.link_us / part,
            kernel_us=self.kernel_us / part, step_ms=self.step_ms / part,
        )  # fmt: skip


def machine(
    name: str, network: str | None = None, link: str | None = None, own: Figures | None = None
) -> Machine:
    """The machine of a YAML file, of a name in `machines/`, or of `own` figures. `network` replaces
    its network, by a name or GB/s of a node; `link` its links, by a name or GB/s of a GPU. Raises
    ValueError if there is no such machine."""
    is_file = Path(name).suffix in (".yaml", ".yml")
    path = Path(name) if is_file else MACHINES / f"{name.lower()}.yaml"
    figures: Figures = {"name": name, **own} if own else _read(path, name)
    for option, given, lines in (("network", network, NETWORKS), ("link", link, LINKS)):
        if given is not None:
            values = lines.get(given, (as_number(given),))
            if not is_number(values[0], above=0):
                raise ValueError(f"--{option} {given}: GB/s, or one of {', '.join(lines)}")
            figures |= dict(zip((f"{option}_gbs", f"{option}_us"), values, strict=False))
    kinds = get_type_hints(Machine, include_extras=True)
    for figure in sorted(figures.keys() ^ kinds.keys()):
        wrong = "is missing" if figure in kinds else "is no figure of a machine"
        raise ValueError(
            f"{name}: {figure} {wrong}; `like: a100-80gb` gives all that a file leaves out"
        )
    for figure, value in figures.items():
        if words := choices(kinds[figure]):
            fits, rule = value in words, " or ".join(words)
        elif figure == "tflops":
            fits = isinstance(value, dict) and all(is_number(x, above=0) for x in value.values())
            rule = "numbers above 0 by precision, such as {bf16: 312}"
        else:
            divides = figure.endswith(("_gbs", "_efficiency", "_node"))
            fits = kinds[figure] is str or is_number(value, above=0 if divides else -1e-9)
            rule = "a number above 0" if divides else "a number, 0 or more"
        if not fits:
            raise ValueError(f"{name}: {figure} is {value!r}, and must be {rule}")
    return Machine(**figures)


def _read(path: Path, said: str) -> Figures:
    """The figures of a machine's file, on top of those of the machine that it is `like`."""
    if not path.is_file():
        raise ValueError(f"--machine {said}: a YAML file, or one of {', '.join(machines())}")
    try:
        own: Figures = dict(yaml.safe_load(path.read_text("utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise ValueError(
            f"--machine {said}: it is no list of `figure: value` ({' '.join(str(error).split())})"
        ) from None
    like = own.pop("like", None)
    others = _read(MACHINES / f"{like}.yaml", f"{said}, like: {like}") if like else {}
    # How right the planner is on one machine says nothing about another.
    unmeasured = {"error": 0.0, "measured_nodes": 0}
    return others | unmeasured | {"name": path.stem} | own


def machines() -> list[str]:
    """The names of the machines that come with the project."""
    return sorted(file.stem for file in MACHINES.glob("*.yaml"))


def is_number(value: object, above: float) -> bool:
    """Whether `value` is a finite number above `above`."""
    return isinstance(value, int | float) and above < value < math.inf


def as_number(text: str) -> float:
    """The number that the text is, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def model_of(preset: str | None, **sizes: Any) -> Model:
    """A preset, with the sizes that are given in place of its own, or a model of sizes alone. The
    MLP is 4 times as wide as the model, unless the preset or the sizes say otherwise."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if preset is not None and preset not in MODELS:
        raise ValueError(f"model {preset}: one of {', '.join(MODELS)}, or sizes instead")
    known = asdict(MODELS[preset]) if preset is not None else {}
    if "hidden" in given:
        known["ffn"] = 4 * given["hidden"]
    given = known | given
    needed = ("layers", "hidden", "heads", "vocab", "seq")
    if missing := [f"--{name}" for name in needed if name not in given]:
        raise ValueError(
            f"{', '.join(missing)} missing: give them, or a preset, such as --model gpt2-xl"
        )
    return Model(**given)


def layout_of(gpus: int | None = None, **given: Any) -> Layout:
    """The layout of these options. Those that are missing or None have their defaults; that of dp
    is all GPUs that the other axes leave. Raises ValueError if the axes do not multiply to gpus."""
    given = {name: value for name, value in given.items() if value is not None}
    others = math.prod(given.get(axis, 1) for axis in RANKS if axis != "dp")
    given.setdefault("dp", max(1, (gpus or 1) // others))
    product = given["dp"] * others
    if gpus not in (None, product):
        axes = " x ".join(f"{axis} {given.get(axis, 1)}" for axis in RANKS)
        raise ValueError(f"{axes}, gpus {gpus}: {product} gpus work")
    return Layout(product, **given)


def choices(hint: Any) -> tuple[Any, ...]:
    """The only values that a field of this type may have; empty if it may have any."""
    return hint.__metadata__[0] if get_origin(hint) is Annotated else ()
