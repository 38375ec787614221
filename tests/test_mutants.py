"""The table of mutants fits the code. `make mutants` says whether tests see them."""

from __future__ import annotations

from functools import cache

import pytest

from tests.mutants.table import ROOT, mutants


def test_every_text_is_there_once_and_every_test_exists(request: pytest.FixtureRequest) -> None:
    """Where a test has cases, of those that were collected."""
    table, wrong, text_of = mutants(), [], cache(lambda path: path.read_text("utf-8"))
    ids = {item.nodeid for item in request.session.items}
    cases = {name.partition("[")[0] for name in ids} if not request.config.option.keyword else set()
    for mutant in table:
        try:
            mutant.applied_to(text_of(ROOT / mutant.file))
        except (ValueError, OSError) as error:
            wrong.append(f"{mutant.said()}: {error}")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            function, case, _ = name.partition("[")
            path = ROOT / file
            there = path.is_file() and f"\ndef {function}(" in text_of(path)
            if not there or (case and f"{file}::{function}" in cases and test not in ids):
                wrong.append(f"{mutant.place}: there is no {test}")
    assert wrong == [] and len(table) >= 150
    assert len({(m.file, m.text, m.replacement) for m in table}) == len(table)
