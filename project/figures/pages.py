"""Pages in HTML: the templates and scripts of project/page/.

A step that a reader takes apart is that of a run, or of none. Its schedules are the catalogue's
lists, for several numbers of ranks and micro-batches: a character per action, since the
micro-batches of a stage come in order. So the JavaScript builds no schedule. It times and checks
lists; tests compare its results with Python's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from pipeline.schedules.catalogue import SCHEDULES, V_SHAPED, chunks_of, find
from pipeline.schedules.schedule import Schedule, stage_ranks
from pipeline.schedules.written import label_of
from runtime.axes import named
from training.launch.errors import UserError

from .style import readable, with_error

PAGE = Path(__file__).parents[1] / "page"
GRID = {"ranks": [*range(2, 9)], "microbatches": [*range(1, 9), 10, 12, 16], "chunks": [2, 3, 4]}


def fill_template(template: Path, **content: Any) -> str:
    """The page that a template makes, which may extend and include the templates of page/. Raises
    UserError if the template is faulty."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, PAGE]), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "named": named,
        "label": label_of,
        "number": readable,
        "spread": lambda mean_and_std: with_error(*mean_and_std),
        "tiny": lambda value: f"{value:.1e}" if value else "0",
        "share": lambda value: f"{value:.1%}",
        "ms": lambda value: f"{1e3 * value:.1f}",
    }
    try:
        return environment.get_template(template.name).render(**content)
    except TemplateError as error:
        raise UserError(f"--template {template}: {error}; leave it out, or mend it") from error


def letters(schedule: Schedule) -> str:
    """The lists as page/textbook.js reads them: a word per rank, a character per action. It stands
    for the action's kind, and for the place of its stage among the rank's stages."""
    ranks = stage_ranks(schedule)
    words = []
    for r, actions in enumerate(schedule):
        stages = [s for s, rank in enumerate(ranks) if rank == r]
        places = (4 * stages.index(a.stage) + "FBIW".index(a.kind.value) for a in actions)
        words.append("".join(chr(ord("A") + place) for place in places))
    return " ".join(words)


def stepper(runs: Sequence[Mapping[str, Any]], ranks: Sequence[int] = ()) -> dict[str, Any]:
    """What page/apart.html needs: the schedules' lists, for these numbers of ranks and those of
    these runs; and the scripts."""
    ranks = sorted({*ranks, *(run["ranks"] for run in runs)})
    sizes = sorted({*GRID["microbatches"], *(run["m"] for run in runs)})
    chunks = range(2, 1 + max([*GRID["chunks"], *(run["chunks"] for run in runs)]))
    lists = {
        name: {
            v: {n: {m: letters(find(name, v)(n, m)) for m in sizes} for n in ranks}
            for v in (chunks if name == "interleaved" else [chunks_of(name)])
        }
        for name in SCHEDULES
    }
    names = ("simulate", "textbook", "explore")
    return {
        "starts": runs,
        "catalogue": {"microbatches": sizes, "v_shaped": V_SHAPED, "lists": lists, "runs": runs},
        "scripts": [Markup((PAGE / f"{name}.js").read_text("utf-8")) for name in names],
    }
