"""The runs that an experiment expands to: one method on one stream under one protocol with one seed each."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ttac.benchmark.checks import check_experiment
from ttac.benchmark.experiment import Entry, Experiment, TargetSpec
from ttac.common.lookup import pick
from ttac.data.corruptions import corruption_names
from ttac.evaluation.protocols import Protocol, get_protocol
from ttac.methods.base import Adapter
from ttac.methods.registry import methods
from ttac.model.speed import Precision, Speed

StatisticsKind = Literal["collected", "inferred", "rescaled"]


@dataclass(frozen=True)
class Run:
    """All that decides what one record says, but for the machine, and where its number stands in a table."""

    name: str  # of the file
    group: str  # protocol under which it is compared
    row: str
    column: str
    method: str
    protocol: str
    source: str
    target: str
    domain: str | None
    severity: int | None
    seed: int
    preset: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    statistics: StatisticsKind | None = None
    epochs: int | None = None  # of multi-pass protocols
    samples: int | None = None
    features: int = 0
    channels_last: bool = False
    autocast: Precision | None = None
    compile: bool = False

    @property
    def speed(self) -> Speed:
        """How the network is run."""
        return Speed(self.channels_last, self.autocast, self.compile)

    def settings(self) -> dict[str, Any]:
        """Say as plain values what the record is to hold of this run."""
        # None where it is off, as in the records of versions without it.
        return {**dataclasses.asdict(self), "options": dict(self.options), "compile": self.compile or None}


def expand(experiment: Experiment) -> list[Run]:
    """List the runs of an experiment in the order of its table; what cannot run raises an error.

    A method that is not defined under a protocol, an option that it does not have, a source, target or protocol of
    another name: all are found before anything runs.
    """
    check_experiment(experiment)
    runs = [run for entry in experiment.runs for run in _of_entry(experiment, entry)]
    if not runs:
        raise ValueError("the experiment has no runs")
    names = [run.name for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two runs would be called {twice}: let row or column name what they differ in")
    return runs


def _of_entry(experiment: Experiment, entry: Entry) -> Iterator[Run]:
    protocol = get_protocol(entry.protocol)
    chosen = list(experiment.targets) if entry.targets is None else entry.targets
    targets = {name: pick(name, experiment.targets, "target of the experiment") for name in chosen}
    for method, varied in itertools.product(entry.methods, _combinations(entry.grid)):
        known = pick(method, methods(), "method")
        _check_method(known, protocol, entry)
        for (name, target), seed in itertools.product(
            targets.items(), experiment.method_seeds.get(method, experiment.seeds)
        ):
            for domain, severity in _domains(target):
                yield _run(experiment, entry, known, varied, name, domain, severity, seed)


def _combinations(grid: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _domains(target: TargetSpec) -> Iterator[tuple[str | None, int | None]]:
    domains: tuple[str | None, ...] = corruption_names(target.corruptions or target.domains) or (None,)
    severities: list[int | None] = [*target.severities]
    yield from itertools.product(domains, severities or [None])


def _check_method(known: type[Adapter], protocol: Protocol, entry: Entry) -> None:
    capabilities = known.capabilities
    if protocol.name not in capabilities.protocols:
        raise ValueError(
            f"{capabilities.title} is not defined under {protocol.name}; it runs under "
            f"{', '.join(capabilities.protocols)}"
        )
    if entry.statistics is not None and protocol.source != "free":
        raise ValueError(
            f"{entry.statistics} statistics are a source-free choice: they do not belong to {protocol.name}"
        )


def _run(
    experiment: Experiment,
    entry: Entry,
    known: type[Adapter],
    varied: Mapping[str, Any],
    target_name: str,
    domain: str | None,
    severity: int | None,
    seed: int,
) -> Run:
    capabilities, target = known.capabilities, experiment.targets[target_name]
    protocol = get_protocol(entry.protocol)
    options = _options(experiment, target, entry, known, varied)
    source = target.sources.get(entry.source, entry.source)
    pick(source, experiment.sources, "source of the experiment")
    statistics: StatisticsKind | None = None
    if "statistics" in capabilities.needs:
        statistics = entry.statistics or ("inferred" if protocol.source == "free" else "collected")
    facts = {
        **options,
        "title": capabilities.title, "method": capabilities.name, "protocol": protocol.name, "source": entry.source,
        "target": target_name, "domain": domain or target_name, "severity": severity, "seed": seed,
    }  # fmt: skip
    row, column = (
        _filled(template, facts) for template in (entry.row or experiment.row, entry.column or experiment.column)
    )
    known_by = [protocol.name, row, column, target_name, domain, severity, f"seed {seed}"]
    return Run(
        name=_slug([str(part) for part in known_by if part is not None]),
        group="-" if capabilities.name == "test" else protocol.name,  # without adaptation all protocols are one
        row=row,
        column=column,
        method=capabilities.name,
        protocol=protocol.name,
        source=source,
        target=target_name,
        domain=domain,
        severity=severity,
        seed=seed,
        preset=target.preset if target.preset in known.presets else None,
        options=options,
        statistics=statistics,
        epochs=experiment.epochs if protocol.passes == "multi" else None,
        samples=experiment.protocol_samples.get(protocol.name, target.samples),
        features=experiment.features,
        channels_last=experiment.channels_last,
        autocast=experiment.autocast,
        compile=experiment.compile,
    )


def _options(
    experiment: Experiment, target: TargetSpec, entry: Entry, known: type[Adapter], varied: Mapping[str, Any]
) -> dict[str, Any]:
    """Lay the options of all methods, of this one, of the entry and of the grid over one another."""
    fields = {option.name: option for option in dataclasses.fields(known.options_type)}
    name = known.capabilities.name
    shared = {**experiment.options, **target.options}
    general = {option: value for option, value in shared.items() if option in fields}
    methods_own = {**experiment.method_options.get(name, {}), **target.method_options.get(name, {})}
    own = {**methods_own, **entry.options, **varied}
    for option in own:
        pick(option, fields, f"option of {name}")
    known.options_type(**{**general, **own})  # values that make no sense are found here
    return {**general, **own}


def _filled(template: str, facts: Mapping[str, Any]) -> str:
    try:
        return template.format(**facts)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{template!r} names {error}; a place can name {', '.join(facts)}") from error


def _slug(parts: list[str]) -> str:
    """Make a file's name of what a run is known by, without what stands there twice.

    >>> _slug(["N-O-SF", "TTAC++", "fog", "C10-C", "fog", "seed 0"])
    'n-o-sf-ttacpp-fog-c10-c-seed-0'
    """
    unique = list(dict.fromkeys(part.replace("+", "p").lower() for part in parts))
    return "-".join(re.sub(r"[^a-z0-9.]+", "-", part).strip("-") for part in unique)
