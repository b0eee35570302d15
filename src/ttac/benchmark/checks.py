"""Mistakes in an experiment that would go unnoticed: names that nothing goes by, and numbers that make no sense."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ttac.benchmark.experiment import Experiment, SourceSpec, TargetSpec
from ttac.benchmark.report.published import published_tables
from ttac.common.lookup import pick
from ttac.data.corruptions import corruption_names
from ttac.data.corruptions.constants import NAMES, SEVERITIES
from ttac.evaluation.protocols import get_protocol
from ttac.methods.registry import methods
from ttac.model.speed import check_compiler
from ttac.source.objectives import make_objective


def check_experiment(experiment: Experiment) -> None:
    """Raise an error that names the first mistake; methods and protocols of the runs are looked up as they expand."""
    _check_methods(experiment)
    for name, source in experiment.sources.items():
        _check_source(name, source, experiment)
    for name, target in experiment.targets.items():
        _check_target(name, target, experiment)
    for table in experiment.published:
        pick(table, published_tables(), "published table")
    for protocol in experiment.protocol_samples:
        get_protocol(protocol)
    if experiment.compile:
        check_compiler()
    _at_least(1, "epochs", [experiment.epochs])
    _at_least(0, "features", [experiment.features])
    _at_least(0, "seeds", experiment.seeds)
    for method, seeds in experiment.method_seeds.items():
        _at_least(0, f"method_seeds.{method}", seeds)
    for protocol, samples in experiment.protocol_samples.items():
        _at_least(1, f"protocol_samples.{protocol}", [samples])


def _check_methods(experiment: Experiment) -> None:
    known = methods()
    for method in (*experiment.method_seeds, *experiment.method_options):
        pick(method, known, "method")
    for target in experiment.targets.values():
        for method in target.method_options:
            pick(method, known, "method")
    anybodys = [option.name for method in known.values() for option in dataclasses.fields(method.options_type)]
    of_targets = [option for target in experiment.targets.values() for option in target.options]
    for option in (*experiment.options, *of_targets):
        pick(option, dict.fromkeys(anybodys), "option of any method")
    entries = (options for entry in experiment.runs for options in (entry.options, entry.grid))
    if any("seed" in options for options in (experiment.options, *experiment.method_options.values(), *entries)):
        raise ValueError("the seed is no option here: name it in seeds or method_seeds")


def _check_source(name: str, source: SourceSpec, experiment: Experiment) -> None:
    if source.arch is None and source.init is None:
        raise ValueError(f"the source {name} needs arch, or init: another source to start from")
    make_objective(source.objective)
    for field in ("epochs", "batch", "size"):
        _at_least(1, f"sources.{name}.{field}", [getattr(source, field)])
    past, before = [name], source.init
    while before is not None:
        if before in past:
            raise ValueError(f"the source {name} starts from itself: {' <- '.join([*past, before])}")
        past.append(before)
        before = pick(before, experiment.sources, f"source that {past[-2]} starts from").init


def _check_target(name: str, target: TargetSpec, experiment: Experiment) -> None:
    if target.corruptions and target.domains:
        raise ValueError("images are corrupted as they are read, or come from the files of a domain: not both")
    for corruption in corruption_names(target.corruptions):
        pick(corruption, dict.fromkeys(NAMES), "corruption")
    if not set(target.severities) <= set(SEVERITIES):
        raise ValueError(f"targets.{name}.severities must be among {SEVERITIES}, not {target.severities}")
    if target.preset is not None:
        presets = [preset for method in methods().values() for preset in method.presets]
        pick(target.preset, dict.fromkeys(presets), "preset of any method")
    for source in (*target.sources, *target.sources.values()):
        pick(source, experiment.sources, "source of the experiment")
    _at_least(1, f"targets.{name}.samples", [target.samples])
    _at_least(1, f"targets.{name}.batch", [target.batch])
    _at_least(0, f"targets.{name}.prefetch", [target.prefetch])


def _at_least(least: int, what: str, values: Iterable[int | None]) -> None:
    wrong = next((value for value in values if value is not None and value < least), None)
    if wrong is not None:
        raise ValueError(f"{what} must be at least {least}, not {wrong}")
