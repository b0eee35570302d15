"""What may be known of the source beside the weights, each with where it comes from and which protocols admit it.

Nothing here lists what methods may want: a method names kinds in words, whoever has such knowledge hands it over, and
the protocols look at its level. A new kind is a class with these few members, anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, runtime_checkable

import torch

from ttac.model.branches import fingerprint as branch_fingerprint
from ttac.model.classifier import Classifier

# free: the weights and how they were trained; light: computed from source data; objective: training was modified for it
Level = Literal["free", "light", "objective"]


@runtime_checkable
class Knowledge(Protocol):
    """Something that a method may know of the source."""

    @property
    def kind(self) -> str:
        """The word that methods ask for it by."""

    @property
    def level(self) -> Level:
        """What it takes to have this."""

    def provenance(self) -> dict[str, Any]:
        """Say as plain values how it came about, for records."""

    def fingerprint(self) -> str:
        """Hash it, so that a state goes on with the same."""

    def check(self, classifier: Classifier) -> None:
        """Raise an error unless it belongs to a classifier."""

    def to(self, device: torch.device) -> Any:
        """Move it to a device."""


@runtime_checkable
class StoredKnowledge(Knowledge, Protocol):
    """Knowledge that a bundle keeps in a file of its own."""

    def save(self, path: Path) -> None:
        """Write a safetensors file, atomically."""

    @classmethod
    def load(cls, path: Path, classifier: Classifier) -> Any:
        """Read a file that `save` wrote, or raise an error where it is damaged or of another model."""


STORED: dict[str, Any] = {}  # classes of stored knowledge by kind
Stored = TypeVar("Stored", bound=type)


def stored(knowledge: Stored) -> Stored:
    """Let bundles keep a kind of knowledge and read it back."""
    STORED[knowledge.kind] = knowledge  # type: ignore[attr-defined]
    return knowledge


class _OfAnyModel:
    """Knowledge without tensors, which nothing about a classifier can contradict."""

    def check(self, classifier: Classifier) -> None:
        """Find nothing wrong."""

    def to(self, device: torch.device) -> Any:
        """Stay."""
        return self


@dataclass(frozen=True)
class TrainingLoss(_OfAnyModel):
    """The loss of the labels that the source was trained with."""

    kind: ClassVar[str] = "training loss"
    level: ClassVar[Level] = "free"

    name: str = "ce"
    parameters: Mapping[str, float] = field(default_factory=dict)

    def provenance(self) -> dict[str, Any]:
        return {"name": self.name, **self.parameters}

    def fingerprint(self) -> str:
        return repr((self.name, sorted(self.parameters.items())))


@dataclass(frozen=True)
class TrainedBranch(_OfAnyModel):
    """That source training has added an auxiliary head, which moves and is saved with its classifier."""

    level: ClassVar[Level] = "objective"

    kind: str
    digest: str  # of its weights

    def provenance(self) -> dict[str, Any]:
        return {"branch": self.kind}

    def fingerprint(self) -> str:
        return self.digest


def how_to_get(kind: str) -> str:
    """Say how a user comes by a kind of knowledge."""
    if kind == "statistics":
        return (
            "pass stats=SourceStatistics.collect(clf, loader) (source-light) or stats=SourceStatistics.infer(clf) "
            "(source-free)"
        )
    if kind.endswith(" branch"):
        return f"use a model trained with the objective ce+{kind.removesuffix(' branch')}"
    return "pass it as knowledge=[...]"


def by_kind(given: Iterable[Knowledge]) -> dict[str, Knowledge]:
    """Put pieces of knowledge under their kinds, or raise where two are of one kind or something is none."""
    known: dict[str, Knowledge] = {}
    for one in given:
        if not isinstance(one, Knowledge):
            raise TypeError(f"{type(one).__name__} is no knowledge of a source: it needs kind, level, provenance, ...")
        if one.level not in get_args(Level):
            raise ValueError(f"the level of {one.kind} is {one.level!r}; expected {', '.join(get_args(Level))}")
        if one.kind in known:
            raise ValueError(f"two pieces of knowledge are of the kind {one.kind!r}: pass one")
        known[one.kind] = one
    return known


def known_of(classifier: Classifier, given: Iterable[Knowledge]) -> dict[str, Knowledge]:
    """Check what is given for a classifier, and add what the classifier itself brings, by kind."""
    known = by_kind(given)
    for kind, one in known.items():
        one.check(classifier)
        known[kind] = one.to(classifier.device)
    if classifier.branch is not None:
        kind = f"{classifier.branch.kind} branch"
        known[kind] = TrainedBranch(kind, branch_fingerprint(classifier.branch))
    return known
