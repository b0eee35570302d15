"""Which sample of which domain comes when: scenarios, and the plans that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

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
class Scenario:
    """Which domain comes when, and in which order and class balance its samples come; docs/streams.md defines each.

    >>> Scenario("continual", order="correlated", concentration=0.1).batch
    64
    """

    sequence: DomainOrder = "single"
    order: SampleOrder = "shuffled"
    concentration: float | None = None  # of "correlated": the smaller, the longer a class stays
    balance: float | tuple[float, ...] | None = None  # imbalance factor of a long tail, or one weight a class
    interlude: int = 0  # clean samples after each domain
    samples: int | None = None  # of each domain; None: all
    batch: int = 64  # samples that arrive at a time
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        for name, choices in (("sequence", get_args(DomainOrder)), ("order", get_args(SampleOrder))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.sequence == "mixed" and self.order == "given":
            raise ValueError("mixed domains come in a random order: order must be shuffled or correlated, not given")
        if (self.order == "correlated") != (self.concentration is not None):
            raise ValueError("order='correlated' and concentration belong together: give both (0.1 is usual) or none")
        if self.concentration is not None and not 0 < self.concentration < math.inf:
            raise ValueError(f"concentration must be positive, not {self.concentration}")
        if isinstance(self.balance, int | float):
            if not 1 <= self.balance < math.inf:
                raise ValueError(f"the imbalance factor must be at least 1, not {self.balance}")
        elif self.balance is not None and not (
            any(self.balance) and all(0 <= weight < math.inf for weight in self.balance)
        ):
            raise ValueError(f"class weights must not be negative, nor all zero: {self.balance}")
        for name, least in (("interlude", 0), ("samples", 1), ("batch", 1), ("seed", 0)):
            value = getattr(self, name)
            if not (value is None and name == "samples") and not (isinstance(value, int) and value >= least):
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value}")


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


def _generator(scenario: Scenario, purpose: int) -> np.random.Generator:
    return np.random.default_rng((scenario.seed, purpose))


# Which domain comes when: groups of segments, which interludes come between


def _groups(
    scenario: Scenario, domains: Sequence[Domain], generator: np.random.Generator
) -> Iterator[Sequence[_Segment]]:
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


def _gradual(
    scenario: Scenario, domains: Sequence[Domain], generator: np.random.Generator
) -> Iterator[Sequence[_Segment]]:
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


def _ordered(
    scenario: Scenario, segment: _Segment, domains: Sequence[Domain], generator: np.random.Generator
) -> _Segment:
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


def _correlated(
    places: np.ndarray, labels: np.ndarray, concentration: float, generator: np.random.Generator
) -> np.ndarray:
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
