"""The methods by name: a file in this folder that defines and registers a class is all that a new one takes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ttac.common.lookup import pick
from ttac.methods.base import Adapter
from ttac.model.classifier import Classifier
from ttac.source.statistics import SourceStatistics

AdapterType = TypeVar("AdapterType", bound=type[Adapter])

_METHODS: dict[str, type[Adapter]] = {}


def register(method: AdapterType) -> AdapterType:
    """Make a method known under the name in its capabilities."""
    name = method.capabilities.name
    if name in _METHODS and _METHODS[name].__qualname__ != method.__qualname__:
        raise ValueError(f"two methods want the name {name!r}: {_METHODS[name]} and {method}")
    _METHODS[name] = method
    return method


def methods() -> Mapping[str, type[Adapter]]:
    """Give all registered methods by name.

    >>> "ttac++" in methods()
    True
    """
    package = importlib.import_module("ttac.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"ttac.methods.{module.name}")
    return dict(sorted(_METHODS.items()))


def adapt(
    classifier: Classifier,
    method: str = "ttac++",
    *,
    stats: SourceStatistics | None = None,
    preset: str | None = None,
    **options: Any,
) -> Adapter:
    """Make an adapter of `method` around a copy of `classifier`; `options` override those of the `preset`.

    >>> import torch
    >>> clf = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)))
    >>> adapt(clf, "test")(torch.rand(4, 3, 2, 2)).shape
    torch.Size([4, 2])
    """
    if not isinstance(classifier, Classifier):
        raise TypeError(
            f"expected a ttac.Classifier, not {type(classifier).__name__}: wrap it in ttac.Classifier(model)"
        )
    found = pick(method, methods(), "method")
    chosen = dict(pick(preset, found.presets, f"preset of {method}")) if preset is not None else {}
    known = {field.name: field for field in fields(found.options_type)}
    for name in options:
        pick(name, known, f"option of {method}")
    return found(classifier, stats, found.options_type(**{**chosen, **options}))
