"""The methods by name: a file in this folder, or anywhere else, that defines a class is all that a new one takes."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.guard import GuardOptions
from ttac.adaptation.method import Method
from ttac.common.imports import file_and_name, import_file
from ttac.common.lookup import pick
from ttac.model.classifier import Classifier
from ttac.source.knowledge import Knowledge, by_kind
from ttac.source.statistics import SourceStatistics

MethodType = TypeVar("MethodType", bound=type[Method])

ENTRY_POINTS = "ttac.methods"  # group under which installed packages name their methods
_METHODS: dict[str, type[Method]] = {}


def register(method: MethodType) -> MethodType:
    """Make a method known under the name in its capabilities."""
    name = method.capabilities.name
    there = _METHODS.get(name, method)
    if (there.__module__, there.__qualname__) != (method.__module__, method.__qualname__):
        raise ValueError(f"two methods want the name {name!r}: {there} and {method}")
    _METHODS[name] = method
    return method


def methods() -> Mapping[str, type[Method]]:
    """Give all methods by name: those of this folder, those that were registered, and those of installed packages.

    >>> "ttac++" in methods()
    True
    """
    package = importlib.import_module("ttac.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"ttac.methods.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            register(_method(entry.load(), entry.value))
        except Exception as error:  # of somebody else's package, which must not take the others away
            owner = "a package" if entry.dist is None else entry.dist.name
            warnings.warn(f"the method {entry.name} of {owner} could not be loaded: {error}", stacklevel=2)
    return dict(sorted(_METHODS.items()))


def find_method(name: str) -> type[Method]:
    """Give the method of a name or of `path/to/file.py:Class`, or raise an error that suggests one.

    >>> find_method("bn").capabilities.title
    'BN'
    """
    if (place := file_and_name(name)) is not None:
        return _from_file(*place)
    if name.endswith(".py"):
        raise ValueError(f"say which class of {name} is the method: {name}:Class")
    return pick(name, methods(), "method")


def _from_file(file: Path, attribute: str) -> type[Method]:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file} to take the method {attribute} from")
    return _method(getattr(import_file(file), attribute, None), f"{attribute} in {file}")


def _method(found: object, where: str) -> type[Method]:
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(f"{where} is no method: expected a class that derives from ttac.adaptation.method.Method")
    return found


def adapt(
    classifier: Classifier,
    method: str | type[Method] = "ttac++",
    *,
    stats: SourceStatistics | None = None,
    knowledge: Iterable[Knowledge] = (),
    preset: str | None = None,
    guard: bool | GuardOptions = False,
    **options: Any,
) -> Adapter:
    """Make an adapter of `method` around a copy of `classifier`; `options` override those of the `preset`.

    `method` is a name of `ttac methods`, `path/to/file.py:Class`, or a class. `stats` are statistics of the source, and
    `knowledge` whatever else is known of it; both are used by methods that ask for them. With `guard`, updates by which
    the model does worse than the source model are undone, see docs/deployment.md; `GuardOptions` has its limits.

    >>> import torch
    >>> clf = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)), mean=0, std=1)
    >>> adapt(clf, "test")(torch.rand(4, 3, 2, 2)).shape
    torch.Size([4, 2])
    """
    if not isinstance(classifier, Classifier):
        raise TypeError(
            f"expected a ttac.Classifier, not {type(classifier).__name__}: wrap it in ttac.Classifier(model)"
        )
    if stats is not None and not isinstance(stats, SourceStatistics):
        raise TypeError(
            f"stats must be ttac.SourceStatistics, not {type(stats).__name__}: SourceStatistics.collect makes them "
            "of source data (source-light), SourceStatistics.infer of the weights (source-free)"
        )
    found = find_method(method) if isinstance(method, str) else _method(method, repr(method))
    chosen = dict(pick(preset, found.presets, f"preset of {found.capabilities.name}")) if preset is not None else {}
    known = {field.name: field for field in fields(found.options_type)}
    for name in options:
        pick(name, known, f"option of {found.capabilities.name}")
    given = [*([] if stats is None else [stats]), *knowledge]
    # What protocols may forbid must not shape options unseen: records name what a method uses alone.
    free = {kind: one for kind, one in by_kind(given).items() if one.level == "free"}
    informed = found.informed({**chosen, **options}, free)
    if not isinstance(guard, bool | GuardOptions):
        raise TypeError(f"guard must be True, False or GuardOptions, not {type(guard).__name__}")
    limits = (GuardOptions() if guard else None) if isinstance(guard, bool) else guard
    return Adapter(classifier, found, found.options_type(**informed), given, guard=limits)
