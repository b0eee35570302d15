"""Names that users type, and what they may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

Known = TypeVar("Known")


def pick(name: str, known: Mapping[str, Known], what: str) -> Known:
    """Give what is known under a name, or raise an error that suggests the nearest ones.

    >>> pick("tac", {"ttac": 1, "bn": 2}, "method")
    Traceback (most recent call last):
    ValueError: unknown method: 'tac'; did you mean ttac? known: ttac, bn
    """
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise ValueError(f"unknown {what}: {name!r}; {hint}known: {', '.join(known) or 'none'}")
