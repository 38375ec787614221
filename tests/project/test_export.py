"""generate.py --export: transformers loads it and computes what the trained model does, and every
program can start from it. And what --model refuses."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load, save
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GPT2LMHeadModel

from project.generate import continuations, parse_generate
from tests.project.conftest import Learn
from tests.project.programs import (
    ROOT,
    SAME,
    TEXT,
    TINY,
    finish,
    losses,
    names_in,
    parse,
    printed_by_generate,
    summary,
)
from tests.ranks import Ranks, under_torchrun
from training.launch.errors import RunError, UserError
from training.launch.world import World
from training.tasks.text_files import END
from training.tasks.texts import load_texts
from training.trained import export, load_trained

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def exported(learned: Learn) -> Callable[[str], Path]:
    """What one process has learned, as a folder for transformers."""

    @cache
    def written(what: str) -> Path:
        workdir = learned(what).workdir
        folder = workdir.with_name(f"{what}_exported")
        printed_by_generate(str(workdir), "--export", str(folder))
        return folder

    return written


@pytest.fixture
def pairs(exported: Callable[[str], Path]) -> Path:
    return exported("pairs")


def sequences_of(what: str, line: str, tokenizer: Any) -> list[tuple[list[int], int]]:
    """The ids of the validation split, and how many of the first ones are not predicted."""
    texts = load_texts(parse(f"train single {line}"), World())
    if what == "pairs":
        examples = texts.pairs("validation")
        assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos_de>", "<eos_en>"]) == [0, 1, 2]
        parts = [(pair["de"] + "<eos_de>", pair["en"] + "<eos_en>") for pair in examples]
        ids = [[tokenizer(text)["input_ids"] for text in part] for part in parts]
        return [((source + target)[:25], len(source)) for source, target in ids]
    assert tokenizer.eos_token == tokenizer.pad_token == END
    stream = [tokenizer.eos_token_id]
    for text in TEXT.split(END):
        stream += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    stream = stream[len(stream) * 19 // 20 :]  # the last twentieth is held out
    return [(stream[at : at + 17], 1) for at in range(0, len(stream) - 1, 16)]


@pytest.mark.parametrize("what", ["pairs", "text"])
def test_transformers_loads_it_and_finds_the_losses_of_the_run(
    learned: Learn, exported: Callable[[str], Path], what: str
) -> None:
    """The validation loss, computed by transformers alone; the tokenizer is the run's."""
    folder, one = exported(what), learned(what)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("Häuser und 7")["input_ids"]) == "Häuser und 7"
    model = GPT2LMHeadModel.from_pretrained(folder).double().eval()
    nats = []
    for ids, known in sequences_of(what, one.line, tokenizer):
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        nats += -log_p.gather(-1, torch.tensor(ids[1:])[:, None])[known - 1 :]
    found = summary(one.workdir)
    loss = found["validation_loss"]
    assert torch.cat(nats).mean().item() == pytest.approx(loss, rel=1e-6)


def test_the_snippet_translates_as_generate_py_does(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the model itself ends its sentence, and where it runs into the length."""
    text = (ROOT / "docs" / "use.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (snippet,) = (block for block in blocks if "from_pretrained" in block)
    snippet = re.sub(r'from_pretrained\(".*?"\)', f'from_pretrained("{pairs}")', snippet)
    source = re.findall(r'tokenizer\("(.*)<eos_de>"', snippet)[0]
    model, tokenizer = load_trained(str(pairs))
    (expected,) = continuations(model, tokenizer, [source], parse_generate([str(pairs)]))
    exec(snippet, {})
    assert " ".join(capsys.readouterr().out.strip().splitlines()) == expected
    # A model that likes nothing but to end: after the first token nothing follows.
    model.lm_head.weight[tokenizer.eos_token_id] *= 10
    model.transformer.ln_f.weight.zero_()
    model.transformer.ln_f.bias.copy_(100 * model.lm_head.weight[tokenizer.eos_token_id])
    ids = tokenizer([source + "<eos_de>", "Ei<eos_de>"], padding=True, return_tensors="pt")
    rows = model.generate(**ids)[:, ids.input_ids.size(1) :]
    assert rows.tolist() == [[tokenizer.eos_token_id]] * 2
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (24, "left")
    assert model.generation_config.max_length == 24
    assert model.generation_config.do_sample is False  # else a pipeline of transformers draws


def test_programs_start_from_it(learned: Learn, pairs: Path, ranks: Ranks) -> None:
    """And find the losses of any other."""
    (single, *others) = losses_of_programs(pairs, ranks, "train pipeline")
    assert others == [pytest.approx(single, rel=SAME, nan_ok=True)]
    assert single[0] < losses(learned("pairs").workdir)[0]


def test_programs_start_from_a_model_of_another_kind(pairs: Path, ranks: Ranks) -> None:
    """With an activation, a width and a head that a model from nothing cannot have."""
    shutil.copytree(pairs, "model")
    config, weights = Path("model/config.json"), Path("model/model.safetensors")
    fields = {"activation_function": "relu", "n_inner": 40, "tie_word_embeddings": False}
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    values = {name: _narrow(name, p) for name, p in load(weights.read_bytes()).items()}
    values["lm_head.weight"] = 2 * values["transformer.wte.weight"]
    weights.write_bytes(save(values))
    single, *others = losses_of_programs(Path("model"), ranks, "train pipeline", "train tensor")
    assert others == [pytest.approx(single, rel=SAME, nan_ok=True)] * 2


def test_a_run_is_resumed_with_the_model_that_it_began_with(pairs: Path) -> None:
    """Wherever that is now. Of its folder only the configuration is read again, which must still
    be the same: another number of heads would fit the weights."""
    sizes = "--model gpt2-mini --n_layer 2 --n_embd 16 --n_head 2 --vocab_size 300"
    line = "train single " + TINY.replace(sizes, "--model {}/model") + "--model_max_length 24 "
    shutil.copytree(pairs, "model")
    finish(line.format(".") + "--n_epochs 1")
    Path("moved").mkdir()
    Path("model").rename("moved/model")
    finish(line.format("moved") + "--n_epochs 1 --resume")
    config = Path("moved/model/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "n_head": 4}))
    with pytest.raises(UserError, match="had a model with n_head 2, and now it is 4; use"):
        finish(line.format("moved") + "--n_epochs 2 --resume")


def _narrow(name: str, p: torch.Tensor) -> torch.Tensor:
    """40 of the 64 neurons of an MLP."""
    if "c_fc" in name:
        return p[..., :40].contiguous()
    return p[:40].contiguous() if name.endswith("mlp.c_proj.weight") else p


def losses_of_programs(model: Path, ranks: Ranks, *on_ranks: str) -> list[list[float]]:
    """The losses of one process, and of these programs, in float64."""
    sizes = "--model gpt2-mini --n_layer 2 --n_embd 16 --n_head 2 --vocab_size 300"
    line = TINY.replace(sizes, f"--model '{model.resolve()}'")
    line += "--model_max_length 24 --n_epochs 1 --dropout 0 --precision fp64 "
    found = []
    for program in ("train single", *on_ranks):
        workdir = Path(program).resolve()
        on = ranks if program in on_ranks else None
        finish(f"{program} {line} --workdir '{workdir}'", on)
        found.append(losses(workdir))
    return found


def test_what_cannot_be_written(pairs: Path) -> None:
    """One line each; nothing that is there is lost, and half an export has not its name."""
    Path("full").mkdir()
    Path("full/notes.txt").touch()
    Path("file").touch()
    for folder, why in (("full", "it already exists"), ("file", "it already exists"),
                        ("file/inner", "cannot be written")):  # fmt: skip
        with pytest.raises((UserError, RunError), match=f"^--export {folder}: {why}"):
            export(*load_trained(str(pairs)), Path(folder))
    assert names_in("full") == ["notes.txt"]
    model, tokenizer = load_trained(str(pairs))
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        patch.object(tokenizer, "save_pretrained", side_effect=full),
        pytest.raises(RunError, match=r"^--export new/er: cannot be written \(No space left"),
    ):
        export(model, tokenizer, Path("new/er"))
    assert names_in("new") == []
    Path("new/empty").mkdir()
    Path("link").symlink_to("new/empty")
    export(model, tokenizer, Path("link"))  # to an empty folder
    assert names_in("new") == ["empty"] and names_in("new/empty") == names_in(pairs)


CONFIG = "config.json"
MISSING = "transformer.h.1.ln_2.bias"


def without_a_bias(good: bytes) -> bytes:
    return save({name: p for name, p in load(good).items() if name != MISSING})


def with_field(name: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda good: json.dumps({**json.loads(good), name: value}).encode()


def with_more_tokens(good: bytes) -> bytes:
    tokenizer = Tokenizer.from_str(good.decode())
    tokenizer.add_tokens([f"word{i}" for i in range(40)])
    return tokenizer.to_str().encode()


SPOILT: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("model.safetensors", lambda good: good[:1000], r"\(SafetensorError: Error while "),
    ("model.safetensors", without_a_bias, f"{MISSING} is missing in its "),
    (CONFIG, with_field("vocab_size", 301),
     r"\(ValueError: transformer.wte.weight is \[300, 16\] in .*, and \[301, 16\] in config"),
    (CONFIG, with_field("model_type", "bert"), "its model_type is bert"),
    (CONFIG, with_field("scale_attn_weights", False), "its scale_attn_weights is False, and here "),
    (CONFIG, with_field("scale_attn_by_inverse_layer_idx", True), "its scale_attn_by_inverse_l"),
    (CONFIG, with_field("add_cross_attention", True), "its add_cross_attention is True"),
    (CONFIG, with_field("is_causal", False), "its is_causal is False"),
    (CONFIG, with_field("quantization_config", {"bits": 8}), "its quantization_config is {'bits'"),
    (CONFIG, with_field("n_inner", 63), "its n_inner is 63, not a multiple of its n_head"),
    (CONFIG, with_field("activation_function", "prelu"), "its activation_function is prelu, which"),
    ("tokenizer.json", lambda _: b"{}", r"\(KeyError: 'added_tokens'\)"),
    ("tokenizer.json", with_more_tokens, r"its tokenizer has \d+ tokens, not 256 to 300"),
]  # fmt: skip


def test_a_model_with_experts_is_not_exported(learned: Learn) -> None:
    with pytest.raises(UserError, match="transformers has no GPT-2 with experts"):
        load_trained(str(learned("experts").workdir))


def test_a_model_that_does_not_fit(pairs: Path) -> None:
    shutil.copytree(pairs, "model")
    line = "train ddp --model model --model_max_length "
    parse(line + "24")
    with pytest.raises(UserError, match="has 24 positions; --model_max_length 24 works"):
        parse(line + "25")
    with pytest.raises(UserError, match=r"has 6 layers .* and every stage needs one"):
        parse("train pipeline --model model --model_max_length 24 --num_workers 7")
    for file, spoil, why in SPOILT:
        path = Path("model", file)
        good = path.read_bytes()
        path.write_bytes(spoil(good))
        with pytest.raises(UserError, match=f"^--model model: neither .*{why}"):
            parse(line + "24")
        path.write_bytes(good)
    weights = Path("model/model.safetensors")
    weights.rename("model/pytorch_model.bin")
    with pytest.raises(UserError, match=r"wte.weight is missing in its \*\.safetensors"):
        parse(line + "24")
    with under_torchrun(rank=1, local_rank=1):  # the first rank of its host has loaded it
        assert parse("train tensor --model model --model_max_length 24").model == "model"
    Path("model/pytorch_model.bin").rename(weights)
    path.unlink()
    with pytest.raises(UserError, match="Couldn't instantiate the backend tokenizer"):
        parse(line + "24")
