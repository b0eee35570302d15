"""Which sample of which domain comes when: scenarios, and the plans that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from ttac.common.options import Checked, require, setting
from ttac.data.labelled import LabelledImages

DomainOrder = Literal["single", "continual", "gradual", "mixed"]
SampleOrder = Literal["shuffled", "given", "correlated"]
CLEAN = "clean"  # the domain of the interludes
MOST_SLOTS = 100  # of label correlation, as in RoTTA
_CHOICE, _ORDER, _INTERLUDE = range(3)  # purposes of random numbers, so that none depends on how many another takes


@dataclass(frozen=True, eq=False)
class Domain:
    """Images of one kind, and what a record is to say of them."""

    name: str
    images: LabelledImages
    severity: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """The name under which errors are counted."""
        return self.name if self.severity is None else f"{self.name} {self.severity}"


@dataclass(frozen=True)
class Scenario(Checked):
    """Which domain comes when, and in which order and class balance its samples come; docs/streams.md defines each.

    >>> Scenario("continual", order="correlated", concentration=0.1).batch
    64
    """

    sequence: DomainOrder = setting("single", "which domain comes when")
    order: SampleOrder = setting("shuffled", "of the samples of a domain")
    concentration: float | None = setting(None, 'of "correlated": the smaller, the longer a class stays', above=0)
    balance: float | tuple[float, ...] | None = setting(None, "factor of a long tail, or class weights", least=0)
    interlude: int = setting(0, "clean samples after each domain", least=0)
    samples: int | None = setting(None, "of each domain; None: all", least=1)
    batch: int = setting(64, "samples that arrive at a time", least=1)
    seed: int = setting(0, "of everything random", least=0)

    def check(self) -> None:
        """Refuse what does not go together."""
        if self.sequence == "mixed" and self.order == "given":
            raise ValueError("mixed domains come in a random order: order must be shuffled or correlated, not given")
        if (self.order == "correlated") != (self.concentration is not None):
            raise ValueError("order='correlated' and concentration belong together: give both (0.1 is usual) or none")
        if isinstance(self.balance, tuple):
            require(any(self.balance), "class weights must not all be zero", self.balance)
        elif self.balance is not None:
            require(self.balance >= 1, "the imbalance factor must be at least 1", self.balance)


class Plan(NamedTuple):
    """A stream in numbers: the domain `[N]` and the row `[N]` of each sample, and the stretches that they form."""

    domains: Tensor
    rows: Tensor
    segments: tuple[tuple[str, int], ...]  # name and samples


class _Segment(NamedTuple):
    name: str
    domains: np.ndarray  # [n]
    rows: np.ndarray  # [n]


def make_plan(scenario: Scenario, domains: Sequence[Domain], clean: Domain | None = None) -> Plan:
    """Decide the whole order of a stream; `clean`, for the interludes, is numbered after the other domains."""
    generator = _generator(scenario, _ORDER)
    interludes = None if clean is None else _interludes(scenario, clean, len(domains))
    segments: list[_Segment] = []
    for group in _groups(scenario, domains, generator):
        segments += [_ordered(scenario, segment, domains, generator) for segment in group]
        if interludes is not None:
            segments.append(next(interludes))
    return Plan(
        torch.from_numpy(np.concatenate([segment.domains for segment in segments])),
        torch.from_numpy(np.concatenate([segment.rows for segment in segments])),
        tuple((segment.name, len(segment.rows)) for segment in segments),
    )


def _generator(scenario: Scenario, purpose: int) -> Generator:
    return np.random.default_rng((scenario.seed, purpose))


# Which domain comes when: groups of segments, which interludes come between


def _groups(scenario: Scenario, domains: Sequence[Domain], generator: Generator) -> Iterator[Sequence[_Segment]]:
    if scenario.sequence == "single" and len(domains) != 1:
        raise ValueError(f"a single stream is of one domain, not {len(domains)}: choose continual, gradual or mixed")
    if scenario.sequence == "gradual":
        yield from _gradual(scenario, domains, generator)
        return
    segments = [_segment(domain.mark, number, _chosen(scenario, domain)) for number, domain in enumerate(domains)]
    if scenario.sequence == "mixed":
        _, numbers, rows = zip(*segments, strict=True)
        yield [_Segment("mixed", np.concatenate(numbers), np.concatenate(rows))]
    else:
        yield from ([segment] for segment in segments)


def _gradual(scenario: Scenario, domains: Sequence[Domain], generator: Generator) -> Iterator[Sequence[_Segment]]:
    """Divide the samples of each name among its severities, up and down."""
    for name in dict.fromkeys(domain.name for domain in domains):
        levels = {domain.severity: number for number, domain in enumerate(domains) if domain.name == name}
        if None in levels or len(levels) < 2:
            raise ValueError(f"a gradual stream needs {name} at two severities or more, with the severity of each")
        rising = [number for _, number in sorted(levels.items(), key=lambda level: level[0] or 0)]
        first = domains[rising[0]]
        if any(not torch.equal(domains[number].images.labels, first.images.labels) for number in rising):
            raise ValueError(f"the severities of {name} are not of the same images, so they cannot share them out")
        numbers = [*rising, *rising[-2::-1]]
        rows = _chosen(scenario, first)
        if len(rows) < len(numbers):
            raise ValueError(f"{len(rows)} samples of {name} are too few for {len(numbers)} steps of severity")
        parts = np.array_split(rows if scenario.order == "given" else generator.permutation(rows), len(numbers))
        yield [_segment(domains[number].mark, number, part) for number, part in zip(numbers, parts, strict=True)]


def _interludes(scenario: Scenario, clean: Domain, number: int) -> Iterator[_Segment]:
    """Walk the clean samples in a random order, from the beginning again after the last."""
    rows = _generator(scenario, _INTERLUDE).permutation(_chosen(replace(scenario, samples=None), clean))
    length = scenario.interlude
    if length > len(rows):
        raise ValueError(f"an interlude of {length} samples is longer than the {len(rows)} clean ones")
    for start in count(step=length):
        yield _segment(clean.mark, number, rows.take(range(start, start + length), mode="wrap"))


def _segment(name: str, number: int, rows: np.ndarray) -> _Segment:
    return _Segment(name, np.full(len(rows), number), rows)


# Which samples of a domain come, and in which order


def _chosen(scenario: Scenario, domain: Domain) -> np.ndarray:
    """Choose rows, sorted: all, some at random, or as many of each class as the balance wants.

    Domains with the same labels get the same rows, so that their errors compare.
    """
    labels = domain.images.labels.numpy()
    order = _generator(scenario, _CHOICE).permutation(len(labels))
    if scenario.balance is not None:
        weights = class_weights(scenario.balance, domain.images.num_classes)
        counts = _class_counts(weights, np.bincount(labels, minlength=len(weights)), scenario.samples)
        order = np.concatenate([order[labels[order] == k][:most] for k, most in enumerate(counts)])
    wanted = scenario.samples or max(len(order), 1)
    if len(order) < wanted:
        balanced = "" if scenario.balance is None else " of this class balance"
        raise ValueError(f"{domain.mark} has {len(order)} samples{balanced}, and {wanted} are asked for")
    return np.sort(order[:wanted])


def _class_counts(weights: np.ndarray, there: np.ndarray, limit: int | None) -> np.ndarray:
    """Count how many samples of each class follow the weights: as many as are `there`, and `limit` at most.

    Classes without a sample do not count. Shares become whole samples by the largest remainders.
    """
    weights = np.where(there > 0, weights, 0.0)
    if not weights.any():
        return np.zeros_like(there)
    wanted = weights > 0
    total = float((there[wanted] / weights[wanted]).min() * weights.sum()) + 1e-6  # rounding must not lose a sample
    total = math.floor(total if limit is None else min(total, limit))
    shares = total * weights / weights.sum()
    counts = np.floor(shares + 1e-6).astype(np.int64)
    largest = np.argsort(counts - shares, kind="stable")[: total - counts.sum()]
    counts[largest] += 1
    return counts


def class_weights(balance: float | Sequence[float], num_classes: int) -> np.ndarray:
    """Give the weight of each class: those given, or a long tail, `factor ** (-k / (K - 1))`.

    >>> class_weights(100.0, 3)
    array([1.  , 0.1 , 0.01])
    """
    if isinstance(balance, int | float):
        return float(balance) ** -np.linspace(0, 1, num_classes)
    if len(balance) != num_classes:
        raise ValueError(f"there are {len(balance)} class weights for {num_classes} classes")
    return np.asarray(balance, dtype=np.float64)


def _ordered(scenario: Scenario, segment: _Segment, domains: Sequence[Domain], generator: Generator) -> _Segment:
    if scenario.order == "given":
        return segment
    places = generator.permutation(len(segment.rows))
    if scenario.concentration is not None:
        labels = np.empty_like(segment.rows)
        for number in np.unique(segment.domains):
            mine = segment.domains == number
            labels[mine] = domains[number].images.labels.numpy()[segment.rows[mine]]
        places = _correlated(places, labels[places], scenario.concentration, generator)
    return _Segment(segment.name, segment.domains[places], segment.rows[places])


def _correlated(places: np.ndarray, labels: np.ndarray, concentration: float, generator: Generator) -> np.ndarray:
    """Split each class over time slots by a Dirichlet draw; in a slot the classes come one after another."""
    classes = np.unique(labels)
    slots: list[list[np.ndarray]] = [[] for _ in range(min(len(classes), MOST_SLOTS))]
    for k in classes:
        members = places[labels == k]
        shares = generator.dirichlet(np.full(len(slots), concentration))
        cuts = (shares.cumsum()[:-1] * len(members)).astype(np.int64)
        for slot, part in zip(slots, np.split(members, cuts), strict=True):
            slot.append(part)
    return np.concatenate([slot[k] for slot in slots for k in generator.permutation(len(slot))])
