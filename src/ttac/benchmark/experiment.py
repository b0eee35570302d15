"""An experiment: which methods run under which protocols on which targets, read from layers of YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, reduce
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from ttac.common.lookup import pick, suggestion
from ttac.common.options import Checked, check_value, setting
from ttac.data.attacks import Norm
from ttac.data.corruptions.constants import SEVERITIES
from ttac.model.speed import Precision
from ttac.source.spec import Amp

Made = TypeVar("Made")
Metric = Literal["error", "seconds", "update"]  # percent, seconds a sample, seconds an update
ScaleName = Literal["tiny", "cpu", "paper"]
Figure = Literal["cumulative", "bars", "heatmap", "time", "tsne"]
EXPERIMENTS = Path(__file__).parent / "experiments"  # those that come with the package


@dataclass(frozen=True)
class SourceSpec(Checked):
    """How a source model is trained; a bundle that is named on the command line takes its place."""

    data: str
    arch: str | None = None  # None: that of `init`
    arch_options: dict[str, int] = field(default_factory=dict)
    objective: str = "ce"
    init: str | None = None  # another source, to start from
    epochs: int = setting(10, least=1)
    batch: int = setting(128, least=1)
    lr: float = 0.1
    weight_decay: float = 5e-4
    strong: float = setting(0.0, least=0, most=1)  # share of each batch under strong views
    seed: int = 0
    size: int | None = setting(None, least=1)  # of image files
    amp: Amp = "auto"  # mixed precision
    channels_last: bool = False  # memory layout of the weights


@dataclass(frozen=True)
class TargetSpec(Checked):
    """Images that the model was not trained on; each domain at each severity is a stream of its own."""

    data: str
    corruptions: list[str] = field(default_factory=list)  # made as the images are read; "standard", "extra"
    domains: list[str] = field(default_factory=list)  # files that the data bring along
    severities: list[int] = setting(make=list, least=SEVERITIES[0], most=SEVERITIES[-1])
    strength: list[float] | None = None  # constants of the corruptions, such as a JPEG quality, instead of severities
    attack: Norm | None = None  # on the model that is adapted, with the usual radius, frozen before anything runs
    split: str = "test"
    samples: int | None = setting(None, least=1)  # chosen at random, the same ones for every seed; None: all
    batch: int = setting(256, least=1)  # that arrive at a time
    prefetch: int = setting(0, least=0)  # batches read ahead, by a thread that would show in the methods' times
    preset: str | None = None  # of the methods that have one of that name
    options: dict[str, Any] = field(default_factory=dict)  # of every method that has them, over the experiment's
    method_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # which source stands for the one that an entry names

    def check(self) -> None:
        """Refuse images of two origins, and a strength that belongs to nothing or contradicts a severity."""
        if self.corruptions and self.domains:
            raise ValueError("images are corrupted as they are read, or come from the files of a domain: not both")
        if self.strength is not None and (self.severities or not self.corruptions):
            raise ValueError("a strength is one of corruptions, in place of severities: leave one of them out")


@dataclass(frozen=True)
class Entry:
    """Some rows of a table: methods under a protocol, with options that may be varied."""

    methods: list[str]
    protocol: str
    source: str | list[str] = "plain"  # of several, all runs on the first come first
    targets: list[str] | None = None  # None: all of the experiment
    preset: str | None = None  # of the methods, instead of the target's
    options: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)  # options of which every combination runs
    statistics: Literal["rescaled"] | None = None  # None: collected, or inferred under a source-free protocol
    row: str | None = None  # as in the experiment
    column: str | None = None
    tables: list[str] | None = None  # of an experiment with several; None: all of them


@dataclass(frozen=True)
class TableSpec:
    """One of several tables that the runs of an experiment make; a run may stand in more than one."""

    title: str
    about: str = ""  # instead of the experiment's
    metric: Metric = "error"
    against: str | None = None  # a method that stands for zero points of error, or for a time of one


@dataclass(frozen=True)
class Experiment(Checked):
    """A table or figure: what runs, and where its numbers stand.

    `row` and `column` are templates of a run's place, which may name {title}, {method}, {protocol}, {source}, {target},
    {domain}, {severity}, {seed} and any option. Runs of one place are averaged.
    """

    title: str
    runs: list[Entry]
    sources: dict[str, SourceSpec]
    targets: dict[str, TargetSpec]
    about: str = ""
    published: list[str] = field(default_factory=list)  # tables of the paper to stand beside
    figures: list[Figure] = field(default_factory=list)
    metric: Literal["error", "seconds"] = "error"
    by_class: bool = False  # columns are classes
    average: bool = False  # a last column
    row: str = "{title}"
    column: str = "{target}"
    seeds: list[int] = setting(make=lambda: [0], least=0)
    method_seeds: dict[str, list[int]] = field(default_factory=dict)  # of some methods, instead
    protocol_samples: dict[str, int] = field(default_factory=dict)  # of some protocols, instead of the targets' own
    options: dict[str, Any] = field(default_factory=dict)  # of every method that has them
    method_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: dict[str, TableSpec] = field(default_factory=dict)  # instead of the one table of all runs
    epochs: int = setting(3, least=1)  # of multi-pass protocols
    features: int = setting(0, least=0)  # samples whose features are kept for t-SNE
    channels_last: bool = False  # this and the next one are those of `Classifier.tuned`
    autocast: Precision | None = None

    def check(self) -> None:
        """Refuse numbers of some methods and protocols that make no sense, and what several tables cannot show."""
        if self.tables and (self.published or self.figures or self.by_class or self.metric != "error"):
            raise ValueError("several tables have their own metrics, and no published numbers, figures or classes")
        for method, seeds in self.method_seeds.items():
            check_value(f"method_seeds.{method}", seeds, list, {"least": 0})
        for protocol, samples in self.protocol_samples.items():
            check_value(f"protocol_samples.{protocol}", samples, int, {"least": 1})


def find_experiments(words: Iterable[str]) -> list[Path]:
    """Give the files of experiments that are named, all of the package's for `all`, or given by their paths.

    >>> [file.name for file in find_experiments(["order", "order"])]
    ['order.yaml']
    """
    known = {file.stem: file for file in sorted(EXPERIMENTS.glob("*.yaml"))}
    found: dict[Path, None] = {}
    for word in words:
        if word == "all":
            found |= dict.fromkeys(known.values())
        elif word in known or Path(word).is_file():
            found[known.get(word, Path(word))] = None
        else:
            near = suggestion(Path(word).stem, known) or ";"
            raise FileNotFoundError(f"no experiment {word}{near} known: all, {', '.join(known)}, and YAML files")
    return list(found)


def load_experiment(file: Path, scale: str, overrides: Iterable[str] = ()) -> Experiment:
    """Read an experiment at a scale: `scales/<scale>.yaml` beside it, itself, its part on the scale, and overrides.

    Later layers win; mappings are merged, everything else is replaced, and null takes a key out. An override is
    `dotted.path=value`, with the value in YAML. A key that no layer may have raises an error.
    """
    own = _read(file)
    scales = own.pop("scales", None)
    known = isinstance(scales, dict) and set(scales) <= set(get_args(ScaleName))
    if not known or not all(isinstance(part, dict | None) for part in scales.values()):
        raise ValueError(f"{file}: scales must be a mapping from {', '.join(get_args(ScaleName))} to what each changes")
    part = pick(scale, scales, f"scale of {file}") or {}
    shared = file.parent / "scales" / f"{scale}.yaml"
    layers = [_read(shared) if shared.exists() else {}, own, part, *map(_override, overrides)]
    try:
        return from_mapping(Experiment, reduce(_merged, layers, {}), f"{file} at scale {scale}")
    except ValueError as error:
        raise ValueError(f"{error}{_hint(str(error))}") from error


def from_mapping(kind: type[Made], content: Mapping[str, Any], where: object) -> Made:
    """Make a dataclass of keys and values; a missing or unknown key, or a value of another type, raises an error.

    `where` names the file in the error, which is one line.
    """
    parser = _parser(kind)  # type: ignore[arg-type]
    try:
        # Older versions know the method under its long name alone, which newer ones warn of.
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
        return kind(**vars(instantiate(parser.parse_object(dict(content)))))
    except (ArgumentError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error


@cache
def _parser(kind: type) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    return parser


def said(spec: Any) -> dict[str, Any]:
    """Give the fields of a dataclass that are not their defaults, so that a field of later versions changes nothing.

    >>> said(SourceSpec("digits", epochs=2))
    {'data': 'digits', 'epochs': 2}
    """
    silent = {one.name: one.default_factory() if callable(one.default_factory) else one.default for one in fields(spec)}
    return {name: value for name, value in vars(spec).items() if value != silent[name]}


def _hint(message: str) -> str:
    """Suggest the key that may have been meant.

    >>> _hint("Option 'epoch' is not accepted")
    '; did you mean epochs?'
    """
    wrong = re.search(r"Option '([^']+)' is not accepted", message)
    known = {one.name for spec in (Experiment, Entry, SourceSpec, TargetSpec, TableSpec) for one in fields(spec)}
    return suggestion(wrong[1], sorted(known - {wrong[1]})) if wrong else ""


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"no experiment {file}")
    content = _from_yaml(file.read_text(encoding="utf-8", errors="replace"), str(file))
    if not isinstance(content, dict):
        raise ValueError(f"{file} must be a mapping, with title, runs and scales")
    return content


def _from_yaml(text: str, what: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{what} is not YAML: {' '.join(str(error).split())}") from error


def _override(text: str) -> dict[str, Any]:
    """Make a layer of `dotted.path=value`.

    >>> _override("targets.C10-C.samples=500")
    {'targets': {'C10-C': {'samples': 500}}}
    """
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise ValueError(f"{text!r} is not of the form dotted.path=value, such as seeds=[0,1]")
    layer = _from_yaml(value, f"the value of {text!r}")
    for key in reversed(path.split(".")):
        layer = {key: layer}
    return layer


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another.

    >>> _merged({"a": {"b": 1, "c": 2}, "d": 4}, {"a": {"c": 3}, "d": None, "e": {"f": None}})
    {'a': {'b': 1, 'c': 3}, 'e': {}}
    """
    merged = dict(below)
    for key, value in above.items():
        there = merged.get(key)
        merged[key] = _merged(there if isinstance(there, dict) else {}, value) if isinstance(value, dict) else value
    return {key: value for key, value in merged.items() if value is not None}
