"""The runs that an experiment expands to: one method on one stream under one protocol with one seed each."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ttac.adaptation.method import Method
from ttac.benchmark.experiment import Entry, Experiment, TargetSpec
from ttac.benchmark.report.published import published_tables
from ttac.common.lookup import pick
from ttac.common.options import Checked
from ttac.data.corruptions import corruption_names
from ttac.data.corruptions.constants import NAMES, check_strength
from ttac.evaluation.protocols import check_defined, get_protocol
from ttac.methods.registry import find_method, methods
from ttac.model.speed import Precision
from ttac.source.objectives import make_objective

Part = tuple[str, str | None, int | None]  # target, domain, severity
StatisticsKind = Literal["collected", "inferred", "rescaled"]


@dataclass(frozen=True)
class PlannedRun(Checked):
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

    @property
    def part(self) -> Part:
        """Name the part of a cell's data that it covers: several domains may share a column."""
        return self.target, self.domain, self.severity

    @property
    def kind(self) -> str:
        """Name what its time depends on: all but its place in the table, the seed and the domain."""
        facts = (self.method, self.preset, self.protocol, self.source, self.target, self.options, self.epochs)
        return repr((*facts, self.samples))

    def settings(self) -> dict[str, Any]:
        """Say as plain values what the record is to hold of this run."""
        return dataclasses.asdict(self)


def expand(experiment: Experiment) -> list[PlannedRun]:
    """List the runs of an experiment in the order of its table; what cannot run raises an error.

    A method that is not defined under a protocol, an option that it does not have, a source, target or protocol of
    another name: all are found before anything runs.
    """
    _check(experiment)
    runs = [run for entry in experiment.runs for run in _of_entry(experiment, entry)]
    if not runs:
        raise ValueError("the experiment has no runs")
    names = [run.name for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two runs would be called {twice}: let row or column name what they differ in")
    return runs


def runs_of_tables(experiment: Experiment) -> dict[str, list[str]]:
    """Name the runs of each of an experiment's tables."""
    named = [(run.name, entry.tables) for entry in experiment.runs for run in _of_entry(experiment, entry)]
    return {table: [name for name, tables in named if tables is None or table in tables] for table in experiment.tables}


def _check(experiment: Experiment) -> None:
    """Raise an error that names the first mistake; methods and protocols of the runs are looked up as they expand."""
    targets = experiment.targets.values()
    of_targets = [method for target in targets for method in target.method_options]
    in_runs = [method for entry in experiment.runs for method in entry.methods]
    named = [
        find_method(name) for name in (*in_runs, *experiment.method_seeds, *experiment.method_options, *of_targets)
    ]
    fields = [option for method in (*methods().values(), *named) for option in dataclasses.fields(method.options_type)]
    anybodys = {option.name: option for option in fields}
    for options in (experiment.options, *(target.options for target in targets)):
        _check_names(options, anybodys, "option of any method")
    entries = (options for entry in experiment.runs for options in (entry.options, entry.grid))
    if any("seed" in options for options in (experiment.options, *experiment.method_options.values(), *entries)):
        raise ValueError("the seed is no option here: name it in seeds or method_seeds")
    for source in experiment.sources:
        _check_source(source, experiment)
    for target in targets:
        _check_target(target, experiment)
    _check_names(experiment.published, published_tables(), "published table")
    _check_names((name for entry in experiment.runs for name in entry.tables or ()), experiment.tables, "table")
    against = (table.against for table in experiment.tables.values() if table.against is not None)
    _check_names(against, dict.fromkeys(in_runs), "method of the runs")
    for protocol in experiment.protocol_samples:
        get_protocol(protocol)


def _check_names(names: Iterable[str], known: Mapping[str, object], what: str) -> None:
    for name in names:
        pick(name, known, what)


def _check_source(name: str, experiment: Experiment) -> None:
    source = experiment.sources[name]
    if source.arch is None and source.init is None:
        raise ValueError(f"the source {name} needs arch, or init: another source to start from")
    make_objective(source.objective)
    past = [name]
    while (before := experiment.sources[past[-1]].init) is not None:
        pick(before, experiment.sources, f"source that {past[-1]} starts from")
        past.append(before)
        if before in past[:-1]:
            raise ValueError(f"the source {name} starts from itself: {' <- '.join(past)}")


def _check_target(target: TargetSpec, experiment: Experiment) -> None:
    presets = {preset: method for method in methods().values() for preset in method.presets}
    names = corruption_names(target.corruptions)
    _check_names(names, dict.fromkeys(NAMES), "corruption")
    if target.strength is not None:
        for name in names:
            check_strength(name, tuple(target.strength))
    _check_names([target.preset] if target.preset else [], presets, "preset of any method")
    _check_names((*target.sources, *target.sources.values()), experiment.sources, "source of the experiment")


def _of_entry(experiment: Experiment, entry: Entry) -> Iterator[PlannedRun]:
    protocol = get_protocol(entry.protocol)
    chosen = list(experiment.targets) if entry.targets is None else entry.targets
    combinations = [dict(zip(entry.grid, values, strict=True)) for values in itertools.product(*entry.grid.values())]
    sources = [entry.source] if isinstance(entry.source, str) else entry.source
    for named, method, varied, name in itertools.product(sources, entry.methods, combinations, chosen):
        known = find_method(method)
        check_defined(known, protocol)
        if entry.statistics is not None and protocol.source != "free":
            raise ValueError(f"{entry.statistics} statistics are a source-free choice: {protocol.name} is not")
        target = pick(name, experiment.targets, "target of the experiment")
        preset = target.preset if target.preset in known.presets else None
        if entry.preset is not None:
            preset = entry.preset
            pick(preset, known.presets, f"preset of {method}")
        options = _options(experiment, target, entry, known, preset, varied)
        source = target.sources.get(named, named)
        pick(source, experiment.sources, "source of the experiment")
        statistics: StatisticsKind | None = None
        if "statistics" in known.capabilities.needs:
            statistics = entry.statistics or ("inferred" if protocol.source == "free" else "collected")
        seeds = experiment.method_seeds.get(method, experiment.seeds)
        for seed, (domain, severity) in itertools.product(seeds, _domains(target)):
            own: dict[str, Any] = {
                "method": method, "protocol": protocol.name, "source": source, "target": name,
                "domain": domain, "severity": severity, "seed": seed,
            }  # fmt: skip
            title = known.capabilities.title
            facts = {**options, "title": title, **own, "source": named, "domain": domain or name}
            row = _filled(entry.row or experiment.row, facts)
            column = _filled(entry.column or experiment.column, facts)
            known_by = [protocol.name, row, column, name, domain, severity, f"seed {seed}"]
            yield PlannedRun(
                name=_slug([str(part) for part in known_by if part is not None]),
                group="-" if method == "test" else protocol.name,  # without adaptation all protocols are one
                row=row,
                column=column,
                **own,
                preset=preset,
                options=options,
                statistics=statistics,
                epochs=experiment.epochs if protocol.passes == "multi" else None,
                samples=experiment.protocol_samples.get(protocol.name, target.samples),
                features=experiment.features,
                channels_last=experiment.channels_last,
                autocast=experiment.autocast,
            )


def _domains(target: TargetSpec) -> Iterator[tuple[str | None, int | None]]:
    domains: tuple[str | None, ...] = corruption_names(target.corruptions or target.domains) or (None,)
    severities: list[int | None] = [*target.severities]
    yield from itertools.product(domains, severities or [None])


def _options(
    experiment: Experiment,
    target: TargetSpec,
    entry: Entry,
    known: type[Method],
    preset: str | None,
    varied: Mapping[str, Any],
) -> dict[str, Any]:
    """Lay the options of all methods, of this one, of the entry and of the grid over one another."""
    fields = {option.name: option for option in dataclasses.fields(known.options_type)}
    name = known.capabilities.name
    shared = {**experiment.options, **target.options}
    general = {option: value for option, value in shared.items() if option in fields}
    methods_own = {**experiment.method_options.get(name, {}), **target.method_options.get(name, {})}
    own = {**methods_own, **entry.options, **varied}
    _check_names(own, fields, f"option of {name}")
    # Values that make no sense are found here.
    known.options_type(**{**known.presets.get(preset or "", {}), **general, **own})
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
