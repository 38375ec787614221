"""Unpicklers that trust nobody take members of enumerations, and no other attribute."""

from __future__ import annotations

import os
from enum import Enum
from io import BytesIO

import pytest

from training.checkpoint import _Metadata, enum_member


class Kind(Enum):
    ONE = 1


def test_enumerations_alone_have_members() -> None:
    assert enum_member(Kind, "ONE") is Kind.ONE
    for members, name, error in ((os, "system", TypeError), (Kind, "__class__", KeyError)):
        with pytest.raises(error, match=name):
            enum_member(members, name)


def test_checkpoints_use_it() -> None:
    """They refuse all other calls: tests of theirs. Python 3.11.0 to 3.11.3 ask for this one."""
    assert _Metadata(BytesIO()).find_class("builtins", "getattr") is enum_member
