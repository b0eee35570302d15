"""Settings that say their default, their limits and their help text in one place, the field, and one check of them all.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Oven(Checked):
...     heat: int = setting(180, "degrees", least=50, most=300)
>>> Oven(20)
Traceback (most recent call last):
ttac.common.options.SettingError: heat must be from 50 to 300, not 20
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LIMITS = ("least", "above", "most", "below")
TRUTH = {"true": True, "yes": True, "false": False, "no": False}


class SettingError(ValueError):
    """The value of one setting breaks a rule; whoever knows the setting by another name can say so."""

    def __init__(self, name: str, rule: str) -> None:
        super().__init__(f"{name} {rule}")
        self.name, self.rule = name, rule


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    make: Callable[[], Any] | None = None,
    **notes: Any,
) -> Any:
    """Make a dataclass field with its help text and the limits of its numbers, each number's where there are several.

    `make` gives a default that must not be shared. Of the `notes`, `least`, `above`, `most` and `below` are limits, and
    the others are for whoever reads the fields, such as the command line.
    """
    limits = {name: notes.pop(name) for name in LIMITS if name in notes}
    metadata = {"help": help, "limits": limits, **notes}
    if make is not None:
        return dataclasses.field(default_factory=make, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Checked:
    """A dataclass whose fields are checked when it is made; rules between fields go into `check`."""

    def __post_init__(self) -> None:
        """Refuse values that break a limit or a rule, with an error that says which."""
        for option, kind in checked_fields(type(self)):
            check_value(option.name, getattr(self, option.name), kind, option.metadata.get("limits", {}))
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other."""


def checked_fields(kind: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """Give the fields of a dataclass with their types."""
    hints = get_type_hints(kind)
    return tuple((option, hints[option.name]) for option in dataclasses.fields(kind))


def check_value(name: str, value: Any, kind: Any, limits: dict[str, float]) -> None:
    """Raise an error unless a value is of its type, a number finite and within its limits.

    >>> check_value("moment", "late", Literal["before", "after"], {})
    Traceback (most recent call last):
    ttac.common.options.SettingError: moment must be before or after, not 'late'
    """

    def must_be(rule: str, condition: bool) -> None:
        if not condition:
            raise SettingError(name, f"must be {rule}, not {value!r}")

    kinds = alternatives(kind)
    if value is None and type(None) in kinds:
        return
    choices = [choice for one in kinds if get_origin(one) is Literal for choice in get_args(one)]
    if choices:
        must_be(" or ".join(map(str, choices)), value in choices)
    elif isinstance(value, tuple | list):
        for item in value:
            check_value(name, item, _item_kind(kinds), limits)
    elif bool in kinds:
        must_be("true or false", isinstance(value, bool))
    elif int in kinds and float not in kinds and str not in kinds:
        must_be("a whole number", isinstance(value, int) and not isinstance(value, bool))
    elif float in kinds:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        must_be("a finite number", number and -math.inf < value < math.inf)
    elif set(kinds) <= {str, type(None)}:
        must_be("a text", isinstance(value, str))
    if limits and isinstance(value, int | float):
        must_be(limits_in_words(limits), within(value, limits))


def read_value(value: Any, kind: Any) -> Any:
    """Make a value of a type from what a command line or a YAML file has for it; what is none is left as it is.

    >>> read_value("3", int | None), read_value(["1", "1/4"], tuple[float, ...]), read_value("wide", int)
    (3, (1.0, 0.25), 'wide')
    """
    kinds = alternatives(kind)
    if isinstance(value, list | tuple):
        return tuple(read_value(item, _item_kind(kinds)) for item in value)
    if value is None or isinstance(value, bool | dict):
        return value
    if Path in kinds or str in kinds:
        return Path(str(value)) if Path in kinds else str(value)
    text = str(value)
    if text.lower() in ("null", "none") and type(None) in kinds:
        return None
    if bool in kinds:
        return TRUTH.get(text.lower(), value)
    try:
        return int(text) if int in kinds else _fraction(text) if float in kinds else value
    except (ValueError, ZeroDivisionError):
        return value


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Give the types that a union is of, or the only one."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _item_kind(kinds: tuple[Any, ...]) -> Any:
    """Give the type of the items of a list, object where any will do."""
    return next((get_args(one)[0] for one in kinds if get_origin(one) in (tuple, list)), object)


def _fraction(text: str) -> float:
    numerator, slash, denominator = text.partition("/")
    return float(numerator) / float(denominator) if slash else float(numerator)


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
