"""What unpicklers that trust nobody may call in the place of `getattr`."""

from __future__ import annotations

from enum import EnumMeta
from typing import Any


def enum_member(members: Any, name: str) -> Any:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as `getattr(members, name)`.

    Raises:
        TypeError: it is no enumeration: an attribute of anything else may be code.
    """
    if not isinstance(members, EnumMeta):
        raise TypeError(f"{name} is asked of {members!r}, which is no enumeration")
    return members[name]
