"""What is left of a served model after its stream was poisoned, with the guard and without.

    python benchmarks/poison.py --model BUNDLE --data cifar10-jpg [--samples 2048] [--out FILE]

Every stream is a poison, or healthy images and then a poison, followed by clean images with labels; those of the last
rows are a legitimate shift, which the guard must not hinder. A chunk is predicted by the served model before it is
learned from; learner, guard and releases are those of the server. The errors are those of the last part of a stream: of
its first 512 samples, of the rest, and of the frozen source model on the same rest. "back after" is the number of
samples of that part from which on the served model errs at most two points more than the source model.

The guard "checks" learns from narrow streams too, so that all is left to the comparison with the source model.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ttac import Classifier, adapt
from ttac.adaptation.guard import Guard, GuardOptions
from ttac.common.environment import environment
from ttac.common.files import write_json
from ttac.data.attacks import USUAL, PGDOptions, pgd
from ttac.data.corruptions import Corruption
from ttac.data.for_model import read_for
from ttac.data.labelled import LabelledImages
from ttac.data.sets import find_data
from ttac.serving.channels import Channels
from ttac.serving.journal import Journal
from ttac.serving.learner import Learner, LearnerSettings
from ttac.serving.live import LiveModel
from ttac.serving.snapshot import Tally
from ttac.serving.state_folder import StateFolder
from ttac.serving.weights import WeightsLayout
from ttac.source.bundle import Bundle
from ttac.source.loading import load_model

CHUNK, FIRST, NEAR = 64, 512, 2.0
MANY = 10_000  # events: all that there are
Shape = tuple[int, int, int]
Images = Callable[[int], tuple[Tensor, Tensor]]  # how many -> images [n, C, H, W] in [0, 1], labels [n]
GUARDS: dict[str, GuardOptions | None] = {"full": GuardOptions(narrow=0.6), "checks": GuardOptions(), "none": None}
METHODS: dict[str, dict[str, Any]] = {"ttac++": {"preset": "fast"}, "tent": {}, "bn": {}}


class Sources:
    """Where the images of a stream come from: parts of a test set that do not overlap, and poisons."""

    def __init__(self, data: LabelledImages, classifier: Classifier) -> None:
        self._data, self._classifier = data, classifier
        self._order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))

    def clean(self, count: int) -> tuple[Tensor, Tensor]:
        """Give the first images of a shuffled test set."""
        return self._read(self._data, self._order[:count])

    def corrupted(self, name: str) -> Images:
        """Give the same ones, corrupted."""
        corrupt = Corruption(name, 5).of(self._data)
        return lambda count: self._read(corrupt, self._order[:count])

    def healthy(self, name: str | None = None) -> Images:
        """Give other ones, clean or corrupted."""
        data = self._data if name is None else Corruption(name, 5).of(self._data)
        return lambda count: self._read(data, self._order.flip(0)[:count])

    def one_class(self, label: int) -> Images:
        """Give images of one class, again and again where there are too few."""
        rows = (self._data.labels == label).nonzero()[:, 0]
        return lambda count: self._read(self._data, rows.repeat(1 + count // len(rows))[:count])

    def noise(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw every pixel from the uniform distribution."""
        return self._without_labels(self._random(count, *self._data.size))

    def colours(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw one colour for each image."""
        return self._without_labels(self._random(count, 1, 1).expand(-1, -1, *self._data.size).contiguous())

    def one_image(self, count: int) -> tuple[Tensor, Tensor]:
        """Repeat one image."""
        return self._without_labels(self.clean(1)[0].expand(count, -1, -1, -1).contiguous())

    def adversarial(self, count: int) -> tuple[Tensor, Tensor]:
        """Attack the source model by PGD, in ten steps."""
        images, labels = self.healthy()(count)
        options, index = PGDOptions("linf", *USUAL["linf"], steps=10), torch.arange(count)
        parts = zip(images.split(256), labels.split(256), index.split(256), strict=True)
        changed = torch.cat([pgd(self._classifier, *part[:2], options, part[2]) for part in parts])
        return (changed * 255).round() / 255, labels

    def _random(self, count: int, *size: int) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        return torch.randint(256, (count, self._data.channels, *size), generator=generator) / 255

    @staticmethod
    def _read(data: LabelledImages, rows: Tensor) -> tuple[Tensor, Tensor]:
        return data.read(rows).float() / 255, data.labels[rows]

    @staticmethod
    def _without_labels(images: Tensor) -> tuple[Tensor, Tensor]:
        return images, torch.full((len(images),), -1)


@dataclass(frozen=True)
class Part:
    """One part of a stream."""

    name: str
    images: Images
    count: int

    @cached_property
    def read(self) -> tuple[Tensor, Tensor]:
        """The images and labels, made once."""
        return self.images(self.count)


class Served:
    """A model that is served while a learner adapts behind it: the parts of `ttac serve` by turns, in one process."""

    def __init__(self, bundle: Bundle, method: str, guard: GuardOptions | None, shape: Shape, folder: Path) -> None:
        self.source, stats = bundle.classifier.copy().eval(), bundle.statistics
        self.journal = Journal(folder / "events.jsonl")
        self._channels = Channels(shape, WeightsLayout.of(self.source.model).size, buffer=CHUNK)
        self._live = LiveModel(self.source.copy(), self._channels.weights)
        self._learner = Learner(
            adapt(self.source, method, stats=stats if method.startswith("ttac") else None, **METHODS[method]),
            None if guard is None else Guard(self.source, stats, guard),
            self._channels,
            StateFolder(folder),
            LearnerSettings(snapshot_every=math.inf, publish_every=0.0, chunk=CHUNK),
        )
        self._learner.start()

    @property
    def tally(self) -> Tally:
        """What the learner has counted."""
        return self._learner.tally

    def predict(self, images: Tensor) -> Tensor:
        """Predict with what is published: classes `[n]`."""
        self._live.refresh()
        return self._live.predict(images).logits.argmax(1)

    def learn(self, images: Tensor) -> None:
        """Learn from a chunk, and publish or undo what was learned."""
        self._channels.ring.push(images.numpy())
        while self._learner.turn():
            pass


def run(served: Served, parts: tuple[Part, ...]) -> dict[str, Any]:
    """Walk a stream, and give the errors of its last part with the counts of the whole."""
    wrong: list[Tensor] = []
    for part in parts:
        images, labels = part.read
        wrong = []
        for chunk, truth in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
            wrong.append(served.predict(chunk) != truth)
            served.learn(chunk)
    images, labels = parts[-1].read
    with torch.no_grad():
        source = torch.cat([served.source(chunk).argmax(1) for chunk in images.split(256)]) != labels
    own = torch.cat(wrong)
    return {
        "first": _percent(own[:FIRST]),
        "rest": _percent(own[FIRST:]),
        "source_first": _percent(source[:FIRST]),
        "source_rest": _percent(source[FIRST:]),
        "back_after": _back_after(own, source),
        **dataclasses.asdict(served.tally),
        "reasons": [event["message"] for event in served.journal.tail(MANY) if event["event"] == "guard"],
    }


def _percent(wrong: Tensor) -> float:
    return 100 * float(wrong.float().mean())


def _back_after(own: Tensor, source: Tensor) -> int | None:
    """Find the first chunk from which on the error is near the source model's; the last 512 are too few to tell."""
    starts = range(0, max(len(own) - FIRST, 0) + 1, CHUNK)
    near = (start for start in starts if _percent(own[start:]) <= _percent(source[start:]) + NEAR)
    return next(near, None)


def among(healthy: Images, poison: Images) -> Images:
    """Alternate images of two kinds, one by one."""

    def images(count: int) -> tuple[Tensor, Tensor]:
        pairs = zip(healthy(count // 2), poison(count // 2), strict=True)
        first, second = (torch.stack(pair, 1).flatten(0, 1) for pair in pairs)
        return first, second

    return images


def streams(sources: Sources, samples: int, shifts: list[str]) -> dict[str, tuple[Part, ...]]:
    """Name the streams."""
    clean = Part("clean", sources.clean, samples)
    poisons = {
        "noise": sources.noise,
        "one class": sources.one_class(3),
        "adversarial": sources.adversarial,
        "one colour": sources.colours,
        "one image": sources.one_image,
    }
    parts = {name: Part(name, images, samples) for name, images in poisons.items()}
    found: dict[str, tuple[Part, ...]] = {f"{name}, clean": (part, clean) for name, part in parts.items()}
    for name, shift in (("clean", None), ("gaussian_noise", "gaussian_noise")):
        before = Part(name, sources.healthy(shift), samples // 2)
        for poison in ("noise", "one class", "adversarial"):
            found[f"{name}, {poison}, clean"] = (before, parts[poison], clean)
    for poison in ("noise", "adversarial"):
        mixed = Part(f"{poison} among clean", among(sources.healthy(), poisons[poison]), samples)
        found[f"{mixed.name}, clean"] = (mixed, clean)
    shifted = {name: Part(name, sources.corrupted(name), samples) for name in shifts}
    return found | {"clean": (clean,)} | {name: (part,) for name, part in shifted.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """Print the results."""
    columns = ("stream", "method", "guard", "first 512", "rest", "source", "back after", "updates", "back", "kept away")
    table = Table(*columns)
    for row in rows:
        counts = (row["updates"], row["rollbacks"] + row["resets"], row["refused_samples"])
        errors = (f"{row[name]:.2f} %" for name in ("first", "rest", "source_rest"))
        back = "never" if row["back_after"] is None else str(row["back_after"])
        table.add_row(row["stream"], row["method"], row["guard"], *errors, back, *map(str, counts))
    Console(width=160).print(table)


def main(
    model: str,
    data: str,
    samples: int = 2048,
    methods: list[str] = list(METHODS),  # noqa: B006 - read alone
    shifts: list[str] = ["gaussian_noise", "fog", "contrast", "defocus_blur"],  # noqa: B006
    only: str = "",
    guards: list[str] = list(GUARDS),  # noqa: B006
    threads: int = 1,
    out: Path | None = None,
) -> None:
    """Serve every stream by every method, with the guard and without.

    Args:
        model: bundle of the source model.
        data: name or folder of the data set.
        samples: of each part of a stream; healthy parts before a poison have half of it.
        methods: to adapt by.
        shifts: corruptions that the guard must not hinder.
        only: part of the names of the streams to run.
        guards: full, checks, none.
        threads: of torch.
        out: JSON file for the results.
    """
    torch.set_num_threads(threads)
    loaded = load_model(model)
    if not isinstance(loaded, Bundle) or loaded.statistics is None:
        raise SystemExit(f"error: {model} is no bundle with statistics")
    images = read_for(loaded.description, find_data(data), "test")
    sources, shape = Sources(images, loaded.classifier), (images.channels, *images.size)
    rows: list[dict[str, Any]] = []
    for name, parts in streams(sources, samples, shifts).items():
        if only not in name:
            continue
        for method in methods:
            for guard in guards:
                with tempfile.TemporaryDirectory() as folder:
                    served = Served(loaded, method, GUARDS[guard], shape, Path(folder))
                    rows.append({"stream": name, "method": method, "guard": guard, **run(served, parts)})
                show(rows[-1:])
                if out is not None:
                    write_json(out, {"rows": rows, "samples": samples, "environment": environment()})
    show(rows)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
