"""Settings that say their default, their limits and their help text in one place, the field, and one check of them all.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Oven(Checked):
...     heat: int = setting(180, "degrees", least=50, most=300)
>>> Oven(20)
Traceback (most recent call last):
ValueError: heat must be from 50 to 300, not 20
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LIMITS = ("least", "above", "most", "below")


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    make: Callable[[], Any] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    **notes: Any,
) -> Any:
    """Make a dataclass field with its help text and the limits of its numbers, each number's where there are several.

    `make` gives a default that must not be shared; `notes` are for whoever reads the fields, such as the command line.
    """
    limits = dict(zip(LIMITS, (least, above, most, below), strict=True))
    metadata = {"help": help, "limits": {name: limit for name, limit in limits.items() if limit is not None}, **notes}
    if make is not None:
        return dataclasses.field(default_factory=make, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Checked:
    """A dataclass whose fields are checked when it is made; rules between fields go into `check`."""

    def __post_init__(self) -> None:
        """Refuse values that break a limit or a rule, with an error that says which."""
        for option, kind in checked_fields(self.__class__):  # type: ignore[arg-type]
            check_value(option.name, getattr(self, option.name), kind, option.metadata.get("limits", {}))
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other."""


@cache
def checked_fields(kind: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """Give the fields of a dataclass with their types."""
    hints = get_type_hints(kind)
    return tuple((option, hints[option.name]) for option in dataclasses.fields(kind))


def check_value(name: str, value: Any, kind: Any, limits: dict[str, float]) -> None:
    """Raise a ValueError unless a value is of its type, a number finite and within its limits.

    >>> check_value("moment", "late", Literal["before", "after"], {})
    Traceback (most recent call last):
    ValueError: moment must be before or after, not 'late'
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value is None and type(None) in kinds:
        return
    choices = [choice for one in kinds if get_origin(one) is Literal for choice in get_args(one)]
    if choices:
        require(value in choices, f"{name} must be {' or '.join(map(str, choices))}", value)
    elif isinstance(value, tuple | list):
        for item in value:
            check_value(name, item, object, limits)
    elif int in kinds and float not in kinds and str not in kinds:
        require(isinstance(value, int) and not isinstance(value, bool), f"{name} must be a whole number", value)
    elif float in kinds:
        require(isinstance(value, int | float) and math.isfinite(value), f"{name} must be a finite number", value)
    if limits and isinstance(value, int | float):
        require(within(value, limits), f"{name} must be {limits_in_words(limits)}", value)


def within(value: float, limits: dict[str, float]) -> bool:
    """Tell whether a number keeps its limits."""
    inf = math.inf
    kept = limits.get("least", -inf) <= value <= limits.get("most", inf)
    return kept and limits.get("above", -inf) < value < limits.get("below", inf)


def limits_in_words(limits: dict[str, float]) -> str:
    """Say limits as people do.

    >>> limits_in_words({"least": 1}), limits_in_words({"above": 0, "most": 1})
    ('at least 1', 'more than 0 and at most 1')
    """
    if set(limits) == {"least", "most"}:
        return f"from {limits['least']} to {limits['most']}"
    words = {"least": "at least", "above": "more than", "most": "at most", "below": "less than"}
    return " and ".join(f"{words[name]} {limit}" for name, limit in limits.items())


def require(condition: bool, rule: str, value: object) -> None:
    """Raise a ValueError with the rule and the value unless the condition holds."""
    if not condition:
        raise ValueError(f"{rule}, not {value!r}")
