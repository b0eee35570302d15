"""Names that users type, and what they may have meant."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
    near = suggestion(name, known) or ";"
    raise ValueError(f"unknown {what}: {name!r}{near} known: {', '.join(known) or 'none'}")


def suggestion(name: str, known: Iterable[str], most: int = 3) -> str:
    """Name the few of those known that look like `name`, as a part of a message; nothing where none does.

    >>> suggestion("tac", ["ttac", "bn"])
    '; did you mean ttac?'
    """
    close = difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def some(names: Sequence[object], most: int = 10) -> str:
    """List names, and no more of them than a message has room for.

    >>> some([1, 2, 3], most=2)
    '1, 2, ...'
    """
    return ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")


def let_own_networks_be_imported(arch: str | None) -> None:
    """Look for the module of `module:callable` in the current folder too, where console scripts do not look."""
    if ":" in (arch or "") and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
