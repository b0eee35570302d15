"""What runs need before they start: source models, statistics inferred from them, and images that deceive them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from ttac.benchmark.experiment import Experiment, said
from ttac.benchmark.runs import PlannedRun
from ttac.common.files import DiskError, text_hash
from ttac.common.lookup import pick
from ttac.common.resumable import StoppedError, alone_in
from ttac.data.attacks import USUAL, PGDOptions
from ttac.data.sets import find_data
from ttac.evaluation.attack_job import RECORD, run_attack
from ttac.evaluation.spec import AttackJob
from ttac.source.bundle import DESCRIPTION, STATISTICS, read_description
from ttac.source.loading import load_model
from ttac.source.spec import ModelSpec, Recipe, TrainJob
from ttac.source.statistics import SourceStatistics
from ttac.source.train_job import run_train

Made = TypeVar("Made")
NEWER = ("strong", "amp", "channels_last")  # keys of a source's recipe that count where they are named


@dataclass(frozen=True)
class RunFiles:
    """Where the files are that one run needs."""

    model: str  # bundle
    statistics: Path | None  # None: those of the bundle, or none
    data: str  # see `find_data`


class Prerequisites:
    """Finds what runs need, and makes what is not there; all of it is kept for the next bench."""

    def __init__(self, experiment: Experiment, folder: Path, bundles: Mapping[str, str], device: str = "cpu") -> None:
        for name, bundle in bundles.items():
            pick(name, experiment.sources, "source of the experiment")
            if not (Path(bundle) / DESCRIPTION).is_file():
                raise FileNotFoundError(f"no bundle of ttac train in {bundle}, which was named as the source {name}")
        self._experiment, self._folder, self._bundles, self._device = experiment, folder, bundles, device

    def prepare(self, runs: Sequence[PlannedRun], console: Console) -> dict[str, RunFiles | Exception]:
        """Train, infer and attack whatever these runs lack, and say where it is, or why it is not, by runs' names."""
        targets = self._experiment.targets
        waiting = f"waiting until another process has made what it needs in {self._folder}"  # perhaps another shard
        with alone_in(self._folder, partial(console.print, waiting, markup=False)):
            # Data that are not there are missed now, rather than after hours of training.
            names = dict.fromkeys(run.target for run in runs)
            data = {name: attempt(partial(find_data, targets[name].data)) for name in names}
            needed = dict.fromkeys(run.source for run in runs if not isinstance(data[run.target], Exception))
            trained = {name: attempt(partial(self._train, name, console)) for name in needed}
            found: dict[str, RunFiles | Exception] = {}
            for run in runs:
                lacking = [one for one in (data[run.target], trained.get(run.source)) if isinstance(one, Exception)]
                found[run.name] = lacking[0] if lacking else attempt(partial(self._of, run, console))
        return found

    def bundle(self, source: str) -> Path:
        """Give the bundle of a source: the one that was named, or the place for ours."""
        named = self._bundles.get(source)
        return self._folder / "sources" / f"{source}-{self._recipe_hash(source)}" if named is None else Path(named)

    def training(self, source: str) -> dict[str, Any]:
        """Say how a source came about: the bundle that was named, or its recipe with those that it starts from."""
        if source in self._bundles:
            return {"bundle": self.weights(source)}
        spec = self._experiment.sources[source]
        return said(spec) if spec.init is None else {**said(spec), "init": self.training(spec.init)}

    def weights(self, source: str) -> str | None:
        """Give the fingerprint of a source's weights, None where they are not there yet."""
        bundle = self.bundle(source)
        return str(read_description(bundle)["fingerprint"]) if (bundle / DESCRIPTION).exists() else None

    def _of(self, run: PlannedRun, console: Console) -> RunFiles:
        target, model = self._experiment.targets[run.target], self.bundle(run.source)
        statistics, data = None, target.data
        if run.statistics == "collected" and not (model / STATISTICS).exists():
            raise ValueError(f"{model} has no statistics of source images: train it with --stats")
        if run.statistics in ("inferred", "rescaled"):
            statistics = self._folder / "statistics" / f"{self.weights(run.source)}-{run.statistics}.safetensors"
            if not statistics.exists():
                console.print(f"the class means of the source model {run.source}: {run.statistics}", markup=False)
                classifier = load_model(str(model)).classifier
                make = SourceStatistics.infer if run.statistics == "inferred" else SourceStatistics.rescale_weights
                make(classifier).save(statistics)
        if target.attack is not None:
            options = PGDOptions(target.attack, *USUAL[target.attack])
            asked = [target.data, target.split, str(target.samples), str(options), str(self.weights(run.source))]
            out = self._folder / "attacks" / f"{run.target}-{text_hash(asked)}"
            data = str(out)
            if not (out / RECORD).exists():
                console.print(f"attacking the source model {run.source} on {run.target}", markup=False)
                attack = AttackJob(
                    model=ModelSpec(str(model), device=self._device),
                    data=target.data,
                    split=target.split,
                    samples=target.samples,
                    out=out,
                    norm=target.attack,
                )
                run_attack(attack, console)
        return RunFiles(str(model), statistics, data)

    def _recipe_hash(self, source: str) -> str:
        """Hash all that a source depends on, the source that it starts from among it."""
        spec = pick(source, self._experiment.sources, "source of the experiment")
        before: list[str] = []
        if spec.init is not None:
            before = [str(self.weights(spec.init)) if spec.init in self._bundles else self._recipe_hash(spec.init)]
        named = said(spec)  # sources of before there were the newer keys keep their place
        recipe = {key: value for key, value in dataclasses.asdict(spec).items() if key in named or key not in NEWER}
        return text_hash([str(recipe), *before])

    def _train(self, source: str, console: Console) -> None:
        out = self.bundle(source)
        if (out / DESCRIPTION).exists():
            return
        spec = pick(source, self._experiment.sources, "source of the experiment")
        if spec.init is not None:
            self._train(spec.init, console)
        console.print(f"training the source model {source}", markup=False)
        job = TrainJob(
            data=spec.data,
            out=out,
            recipe=Recipe(spec.epochs, spec.batch, spec.lr, spec.weight_decay, strong=spec.strong, seed=spec.seed),
            arch=spec.arch,
            options=spec.arch_options,
            objective=spec.objective,  # type: ignore[arg-type]  # which it checks
            init=None if spec.init is None else str(self.bundle(spec.init)),
            size=spec.size,
            stats=True,
            device=self._device,
            amp=spec.amp,
            channels_last=spec.channels_last,
        )
        run_train(job, console)


def attempt(make: Callable[[], Made]) -> Made | Exception:
    """Give what `make` makes, or the error that it raises; a signal or a full disk ends everything all the same.

    >>> attempt(lambda: int("7")), attempt(lambda: int("seven"))
    (7, ValueError("invalid literal for int() with base 10: 'seven'"))
    """
    try:
        return make()
    except (StoppedError, DiskError):
        raise
    except Exception as error:
        return error
