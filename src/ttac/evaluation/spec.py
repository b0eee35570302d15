"""One run by its names: which model, which method, which stream of images, under which protocol.

`ttac evaluate`, `ttac adapt`, `ttac serve`, `ttac replay` and the benchmark are made of these, and so are their command
lines, which is why nothing here imports torch before it is needed. `evaluation.prepare` makes the real things of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ttac.common.options import Checked, setting
from ttac.data.fields import CORRUPTION_NAMES, PartSpec, data_setting, frost_setting
from ttac.evaluation.loggers import check_log, log_setting
from ttac.source.spec import ModelSpec

if TYPE_CHECKING:
    from ttac.data.attacks import PGDOptions
    from ttac.data.for_model import TakesImages
    from ttac.data.streams import Scenario, Stream
    from ttac.model.weights import LoadedModel

__all__ = ["AdaptJob", "EvaluateJob", "MethodSpec", "ModelSpec", "RunSpec", "StreamSpec"]
USUAL_SEVERITY = 5


@dataclass(frozen=True)
class MethodSpec(Checked):
    """A method, its options over those of a preset, and its statistics."""

    method: str = setting("ttac++", "a wrong one lists them all")
    preset: str | None = setting(None, "set of options that the method names")
    # Values may be words too.
    options: Mapping[str, Any] = setting(make=dict, help="option of the method; can be repeated", option="set")
    stats: Path | None = setting(None, "source statistics (default: the bundle's, or inferred, if needed)")


@dataclass(frozen=True)
class StreamSpec(Checked):
    """Labelled images, and what becomes of them on their way to the method; docs/streams.md defines the scenarios."""

    data: str = data_setting()
    split: str = setting("test", "part of the data set")
    corruption: tuple[str, ...] = setting((), f"corrupt the images as they are read: {CORRUPTION_NAMES}")
    domain: tuple[str, ...] = setting((), f"published files of the data set: {CORRUPTION_NAMES}")
    severity: tuple[int, ...] | None = setting(None, "1 to 5 (default: 5; all of them in a gradual stream)")
    frost: Path | None = frost_setting()
    clean: str | None = setting(None, "images of interludes (default: those before corruption)")
    scenario: Literal["single", "continual", "gradual", "mixed"] = setting("single", "which domain comes when")
    order: Literal["shuffled", "given", "correlated"] = setting("shuffled", "of a domain's samples")
    concentration: float | None = setting(None, "of correlated labels: the smaller, the longer a class stays", above=0)
    imbalance: float | None = setting(None, "factor between the most and the least frequent class", least=1)
    interlude: int = setting(0, "clean images after each domain", least=0)
    samples: int | None = setting(None, "of each domain, chosen at random (default: all)", least=1)
    batch: int = setting(64, "images that arrive at a time", least=1)
    seed: int = setting(0, "of everything random", least=0)
    prefetch: int = setting(2, "batches to read ahead", least=0)
    some: int | None = setting(None, option=None)  # images of the data alone, the same ones whatever the seed
    corruption_seed: int | None = setting(None, option=None)  # None: that of the stream
    strength: tuple[float, ...] | None = setting(None, option=None)  # of the corruptions, in place of severities

    def check(self) -> None:
        """Refuse what contradicts itself."""
        if self.corruption and self.domain:
            raise ValueError("images are corrupted as they are read, or come from the files of a domain: not both")
        if self.interlude and not self.corruption and self.clean is None:
            raise ValueError("interludes show clean images: name them with --clean")

    def plan(self) -> Scenario:
        """Say which domain comes when, and in which order its samples come."""
        from ttac.data.streams import Scenario

        same = ("order", "concentration", "interlude", "samples", "batch", "seed")
        return Scenario(self.scenario, balance=self.imbalance, **{name: getattr(self, name) for name in same})

    def build(self, model: TakesImages) -> Stream:
        """Find the data, and make the stream of them for a model; pixels are read later."""
        from ttac.data.corruptions import corruption_names
        from ttac.data.corruptions.constants import SEVERITIES
        from ttac.data.corruptions.frost import FrostPhotographs
        from ttac.data.for_model import read_for
        from ttac.data.sets import find_data
        from ttac.data.streams import Domain, Stream, corrupted_domains

        plan, found = self.plan(), find_data(self.data)
        usual = SEVERITIES if self.scenario == "gradual" else (USUAL_SEVERITY,)
        clean = None if self.clean is None else read_for(model, find_data(self.clean), self.split)
        if self.corruption:
            original = read_for(model, found, self.split).some(self.some)
            photographs = None if self.frost is None else FrostPhotographs.read(self.frost)
            seed = self.seed if self.corruption_seed is None else self.corruption_seed
            names = corruption_names(self.corruption)
            domains = corrupted_domains(original, names, self.severity or usual, seed, photographs, self.strength)
            return Stream(domains, plan, clean=clean or original, prefetch=self.prefetch)
        levels = self.severity or (usual if found.layout.severities else (None,))
        title = found.path.name if found.spec is None else found.spec.name
        domains = [
            Domain(name or title, images.some(self.some), severity)
            for name in corruption_names(self.domain) or (None,)
            for severity in levels
            for images in [read_for(model, found, self.split, domain=name, severity=severity)]
        ]
        return Stream(domains, plan, clean=clean, prefetch=self.prefetch)


@dataclass(frozen=True)
class RunSpec(Checked):
    """A method on a model and a stream, under a protocol: all that a record depends on."""

    model: ModelSpec
    method: MethodSpec
    stream: StreamSpec
    protocol: str = setting("N-O-SF", "what is allowed")
    epochs: int | None = setting(None, "passes of the multi-pass protocols (default: 3)", least=1)
    guard: bool = setting(False, "undo updates by which the model does worse than the source model")


@dataclass(frozen=True)
class EvaluateJob(Checked):
    """Measure a method on a stream of labelled images, which it never sees the labels of."""

    run: RunSpec
    out: Path = setting(help="record to write; one that is there is not replaced", output="file")
    log: tuple[str, ...] = log_setting()

    def check(self) -> None:
        """Refuse loggers that there are none of."""
        check_log(self.log)


@dataclass(frozen=True)
class AdaptJob(Checked):
    """Predict a folder of images in order while adapting; the same command goes on after a stop."""

    model: ModelSpec
    method: MethodSpec
    images: Path = setting(help="images, also in subfolders")
    out: Path = setting(help="where the predictions, weights and record go", output="folder")
    batch: int | None = setting(None, "images that arrive at a time (default: a window)", least=1)
    labels: Path | None = setting(None, "CSV file of file,label, to tell errors by; the method never sees it")
    compare: bool = setting(True, "run neither the frozen model nor BN beside it, and write no comparison")
    checkpoint_every: float = setting(120.0, "seconds; 0: after every batch", least=0)
    log: tuple[str, ...] = log_setting()
    guard: bool = setting(True, "keep every update, also those by which the model does worse than the source model")

    def check(self) -> None:
        """Refuse loggers that there are none of."""
        check_log(self.log)


@dataclass(frozen=True, kw_only=True)
class AttackJob(PartSpec):
    """Write a data set that deceives a model, by projected gradient descent; the same command goes on."""

    model: ModelSpec = setting(without=("size", "classes", "channels_last", "autocast"))
    out: Path = setting(help="where the images, labels and record go", output="folder")
    norm: Literal["linf", "l2"] = setting("linf", "of each value, or of the whole image")
    eps: float | None = setting(None, "largest change, pixels in [0, 1] (default: 8/255, 0.5 with l2)", above=0)
    step: float | None = setting(None, "length of a step (default: 0.01, 0.1 with l2)", above=0)
    steps: int = setting(40, "steps an image", least=1)
    random_start: bool = setting(True, "start at the clean image, not somewhere in the ball")
    seed: int = setting(0, "of the random start", least=0)
    batch: int = setting(256, "images at a time", least=1)

    def check(self) -> None:
        """Refuse a ball in which 8-bit images have no room to move."""
        if self.eps is not None and self.eps < 1 / 255:
            raise ValueError(f"eps {self.eps:.3g} is less than one level of 8-bit images, 1/255")

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model."""
        return self.model.load()

    @cached_property
    def options(self) -> PGDOptions:
        """How far an image may be changed, and how it is done."""
        from ttac.data.attacks import USUAL, PGDOptions

        eps, step = USUAL[self.norm]
        return PGDOptions(self.norm, self.eps or eps, self.step or step, self.steps, self.random_start, self.seed)
