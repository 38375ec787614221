"""Translates, or continues texts, with a GPT-2 that was trained here or elsewhere.

A line in gives a line out, in the same order. A model that was trained on pairs translates; any
other one continues the line. An empty line is translated to an empty line, or continued as the
beginning of a new text.

    python project/generate.py workdir "Der Mann kauft das Ei."
    python project/generate.py workdir --input sentences.txt > translations.txt
    python project/generate.py workdir "It was" --num_samples 3 --temperature 0.8 --top_k 40
    python project/generate.py workdir --export gpt2_de_en        a folder for transformers
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from project.command_line import Parser
from training.options import Number, count, whole

TEMPERATURE = Number(float, lambda x: 0 <= x < float("inf"), "0 or more, as 0.8")


def parse_generate(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program if it cannot be right."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("trained", metavar="FOLDER", help="a run's workdir, a checkpoint, a folder or hub id")
    add("text", nargs="*", default=[], help="lines of text; default: those of standard input")
    add("--input", type=Path, metavar="FILE", help="read the lines from this file")
    add("--export", type=Path, metavar="NEW",
        help="only write model, tokenizer and model card there, for transformers")  # fmt: skip
    add("--num_samples", type=count, default=1, metavar="N", help="lines out per line in [1]")
    add("--temperature", type=TEMPERATURE, metavar="T",
        help="sample tokens, from logits divided by this; 0 takes the most probable; default: 0, "
        "or 1 with --top_k or several samples")  # fmt: skip
    add("--top_k", type=count, metavar="K", help="sample from the K most probable tokens")
    add("--seed", type=whole, default=0, help="of the samples [0]")
    add("--max_new_tokens", type=count, default=128, metavar="N",
        help="per line out, as far as the model's length allows [128]")  # fmt: skip
    add("--batch_size", type=count, default=128, metavar="N", help="lines at a time [128]")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto",
        help="auto: a GPU if there is one")  # fmt: skip
    args = parser.parse_intermixed_args(argv)  # text may follow options
    if args.text and args.input:
        parser.error(f"--input {args.input}: there is text on the command line, too; leave one out")
    if args.export and (args.text or args.input):
        parser.error(f"--export {args.export} generates nothing: leave out text and --input")
    several = args.num_samples > 1 or args.top_k is not None
    if args.temperature == 0 and several:
        parser.error("--temperature 0 with --num_samples or --top_k: the most probable token is "
                     "always the same; --temperature 0.8 works")  # fmt: skip
    if args.temperature is None:
        args.temperature = 1.0 if several else 0.0
    return args


if __name__ == "__main__":
    parse_generate()  # before torch is imported, which takes seconds


from project.utils import run_program
from training.export import export
from training.launch.errors import UserError
from training.launch.world import choose_device
from training.seeds import stream
from training.tasks.generation import continue_all
from training.tasks.sampling import chances_of
from training.trained import SamplingDecoder, Trained, load_trained


def read_lines(args: argparse.Namespace) -> list[str]:
    """The lines to translate or continue. Raises UserError if the file cannot be read."""
    if args.text:
        return [line for text in args.text for line in text.split("\n")]
    where = "standard input" if args.input is None else f"--input {args.input}"
    try:
        content = sys.stdin.buffer.read() if args.input is None else args.input.read_bytes()
        return content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not UTF-8")
        raise UserError(
            f"{where}: it cannot be read ({reason}); a text file in UTF-8 works"
        ) from error


def continuations(
    trained: Trained, lines: Sequence[str], args: argparse.Namespace
) -> list[list[str]]:
    """The translations or continuations of each line. Raises UserError if a line is too long.

    Draws depend only on the seed, the number of the line, and the number of the sample.
    """
    tokenizer, end, n = trained.tokenizer, trained.source_end, args.num_samples
    prompts: list[list[int]] = []
    most: list[int] = []  # new tokens
    seeds: list[int] = []
    for number, line in enumerate(lines):
        ids = tokenizer(line + (end or ""), verbose=False)["input_ids"] or [tokenizer.eos_token_id]
        if len(ids) >= trained.max_length:
            raise UserError(
                f"line {number + 1} has {len(ids)} tokens, and the model was trained on sequences "
                f"of {trained.max_length}; {trained.max_length - 1} tokens or fewer work"
            )
        nothing = end and not line.strip()  # to translate
        prompts += [ids] * n
        most += [0 if nothing else min(args.max_new_tokens, trained.max_length - len(ids))] * n
        seeds += [stream(args.seed, "generation", number, sample) for sample in range(n)]
    device = trained.model.device
    chances = chances_of(seeds, max(most, default=0), device) if args.temperature else None
    decoder = SamplingDecoder(trained.model, chances, args.temperature, args.top_k)
    texts = continue_all(decoder, tokenizer, prompts, most, device, args.batch_size, "Generating")
    found = []
    for i, text in enumerate(texts):
        text = text.strip() if end else lines[i // n] + text
        found.append(" ".join(text.splitlines()))
    return [found[i : i + n] for i in range(0, len(found), n)]


def main() -> None:
    """The program."""
    args = parse_generate()
    if args.export is not None:
        export(load_trained(args.trained), args.export)
        print(f"Model and tokenizer, for transformers, are in {args.export}/.")
        return
    lines = read_lines(args)
    device = choose_device(args.device, 0, 1)
    for texts in continuations(load_trained(args.trained, device), lines, args):
        print("\n".join(texts), flush=True)


if __name__ == "__main__":
    run_program(main)
