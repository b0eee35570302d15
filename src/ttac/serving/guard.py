"""The guard: the frozen source model watches the adapting one on the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ttac.methods.base import require
from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating
from ttac.serving.measures import (
    AnchorDistance,
    Outputs,
    balance,
    expected_label_entropy,
    information,
    label_entropy,
    mean_entropy,
)
from ttac.source.statistics import SourceStatistics

Action = Literal["publish", "wait", "rollback", "reset"]
Measures = dict[str, dict[str, float | None]]
Distances = dict[str, list[float | None]]
LEAST = 32  # samples without which nothing is said of a stream or a model
PASS = 64  # samples of a forward pass: all probes of large images at once would want gigabytes
RELEASE = 1.1  # times the limit at which a narrow stream began, before it is learned from again
RULES: dict[str, tuple[bool, str]] = {  # whether the limit is the most that may be, and what is said if it is broken
    "information": (False, "its predictions tell {mine:.2f} nats, those of the source model {its:.2f}"),
    "agreement": (False, "it agrees with a sure source model on {mine:.2f} of the samples"),
    "distance": (True, "it is {mine:.2f} from the anchors, the source model {its:.2f}"),
    "norm": (True, "its features are {mine:.3g} long, those of the source model {its:.3g}"),
}


@dataclass(frozen=True)
class GuardOptions:
    """When the guard steps in.

    The limits lie between what was measured of a ResNet-20 on CIFAR-10. Of 128 samples it sees 4.6 to 10 of 10 classes
    under all corruptions of severity 5, and 1 to 3 in noise, one class, one colour or one image; 0.6 are 3.9 classes.
    TTAC++ that adapts, also from a corruption back to clean images, is at most 1.2 times as far from the anchors as the
    source model and tells at least 0.93 times as much; on clean images after noise it is 1.7 times as far.
    """

    probes: int = 256  # newest samples that both models are compared on
    recent: int = 128  # newest samples whose predicted classes are counted
    narrow: float = 0.6  # least entropy of those, as a share of what as many samples of the source have
    information: float = 0.8  # least information of the adapted model's predictions, as a share of the source model's
    distance: float = 1.3  # most distance from the anchors, as a multiple of the source model's
    agreement: float = 0.5  # least share of equal predictions, where the source model is sure and various
    norm: float = 4.0  # most length of the features, as a multiple of the source model's
    rollbacks: int = 3  # in a row, after which a refusal is a reset

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for name in ("probes", "recent"):
            require(getattr(self, name) >= LEAST, f"{name} must be at least {LEAST}", getattr(self, name))
        for name in ("narrow", "information", "agreement"):
            require(0 <= getattr(self, name) <= 0.9, f"{name} must be in [0, 0.9]", getattr(self, name))
        for name in ("distance", "norm"):
            require(getattr(self, name) > 1, f"{name} must be more than 1", getattr(self, name))
        require(self.rollbacks >= 0, "rollbacks must not be negative", self.rollbacks)


@dataclass(frozen=True)
class GuardReport:
    """What the guard says of a candidate."""

    action: Action  # wait: for more samples; rollback: to the last state that was published; reset: to the source model
    reasons: tuple[str, ...]  # why not publish, in words with numbers
    measures: Measures  # by name: adapted, source, limit
    distances: Distances  # adapted, source: [K] from the anchors; empty without statistics


class Guard:
    """Says which samples an adapter may learn from, and whether what it has learned may be published.

    A stream is not learned from while the source model sees hardly more than one class in it: noise, one object in
    front of the camera, a stuck frame. Nor is an image of one colour, ever. A candidate is not published where it does
    worse than the source model on the newest samples, by measures that need no labels.

    A rollback of the adapter leaves the guard as it is: what it knows of the stream stays true, and it counts refusals
    in a row. It has to be told what was `published`, as not all that it lets pass can be. `state` is for restarts.
    """

    def __init__(self, source: Classifier, stats: SourceStatistics | None, options: GuardOptions | None = None) -> None:
        self.options = options or GuardOptions()
        self.source = source.copy().eval().requires_grad_(False)
        self.refused: str | None = None  # why the stream is not learned from; not said of single images
        self.refusals = 0  # of candidates, in a row
        self._distance = None if stats is None else AnchorDistance(stats.to(source.mean.device))
        self._expected = _expected_entropies(stats, source.num_classes)
        self._blank = 0  # images of one colour in a row
        self._narrow = False
        self._labels = torch.empty(0, dtype=torch.int64)  # [<= recent] that the source model predicted
        self._images: Tensor | None = None  # [<= probes, C, H, W] uint8, admitted ones
        self._outputs: Outputs | None = None  # of the source model for them
        self._published: dict[str, Tensor] | None = None  # weights; None: those of the source model

    @torch.no_grad()
    def admit(self, images: Tensor) -> Tensor:
        """Note images `[n, C, H, W]` of the stream, and give those that may be learned from."""
        levels = (self.source.check(images) * 255).round().byte()
        pixels = levels.flatten(2)
        blank = (pixels.amax(2) == pixels.amin(2)).all(1)
        levels = levels[~blank]
        self._blank = self._blank + len(images) if blank.all() else 0
        self.refused = f"the last {self._blank} images are of one colour" if self._blank >= LEAST else None
        if len(levels):
            outputs = _run(self.source, levels)
            self._note_labels(outputs.labels.cpu())
            if not self._narrow:
                self._note_probes(levels, outputs)
        return images[:0] if self._narrow else images[~blank.to(images.device)]

    def _note_labels(self, labels: Tensor) -> None:
        self._labels = torch.cat([self._labels, labels])[-self.options.recent :]
        count = len(self._labels)
        if count < LEAST:
            return
        found, usual = label_entropy(self._labels), self._expected(count)
        limit = self.options.narrow * usual * (RELEASE if self._narrow else 1)
        self._narrow = found < limit
        if self._narrow:
            self.refused = (
                f"the source model sees {math.exp(found):.1f} classes in the last {count} samples, "
                f"fewer than {math.exp(limit):.1f}"
            )

    def _note_probes(self, levels: Tensor, outputs: Outputs) -> None:
        if self._images is not None and self._outputs is not None:
            levels, outputs = torch.cat([self._images, levels]), self._outputs.followed_by(outputs)
        most = self.options.probes
        self._images, self._outputs = levels[-most:], outputs.newest(most)

    @torch.no_grad()
    def check(self, candidate: Classifier) -> GuardReport:
        """Compare a candidate with the source model on the newest samples that were admitted."""
        reasons, measures, distances = self._judge(candidate)
        if not reasons:
            if self._outputs is None or len(self._outputs) < LEAST:
                return GuardReport("wait", (), measures, distances)
            self.refusals = 0
            return GuardReport("publish", (), measures, distances)
        self.refusals += 1
        if self.refusals <= self.options.rollbacks and self._published_is_sound():
            return GuardReport("rollback", reasons, measures, distances)
        self.refusals = 0
        return GuardReport("reset", reasons, measures, distances)

    def published(self, weights: Mapping[str, Tensor] | None) -> None:
        """Note the weights that are served from now on, which a rollback goes to; None: those of the source model."""
        self._published = None if weights is None else {name: tensor.clone() for name, tensor in weights.items()}

    def _published_is_sound(self) -> bool:
        """Judge what was published by the samples of now: it may have been published before they told against it."""
        if self._published is None:
            return False
        before = self.source.copy()
        before.model.load_state_dict(self._published)
        return not self._judge(before)[0]

    def _judge(self, model: Classifier) -> tuple[tuple[str, ...], Measures, Distances]:
        if not all(bool(tensor.isfinite().all()) for tensor in model.model.state_dict().values()):
            return ("its weights are not finite",), {}, {}
        if self._images is None or self._outputs is None:
            return (), {}, {}
        adapted, source = _run(model, self._images), self._outputs
        if not adapted.finite:
            return ("its outputs are not finite",), {}, {}
        measures = _compare(adapted, source, self._distance, self._expected(len(source)), self.options)
        distances: Distances = {}
        if self._distance is not None:
            distances = {"adapted": self._distance.by_class(adapted), "source": self._distance.by_class(source)}
        return _reasons(measures) if len(source) >= LEAST else (), measures, distances

    def state(self) -> dict[str, Any]:
        """Give all that the stream has made: plain tensors, numbers and text."""
        probes = None
        if self._images is not None and self._outputs is not None:
            probes = {"images": self._images, **vars(self._outputs)}
        stream = {"refused": self.refused, "blank": self._blank, "narrow": self._narrow, "labels": self._labels}
        return {**stream, "refusals": self.refusals, "probes": probes, "published": self._published}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        device, probes = self.source.mean.device, state["probes"]
        images = outputs = None
        if probes is not None:
            images, features, logits = (probes[name].to(device) for name in ("images", "features", "logits"))
            outputs = Outputs(features, logits)
            if logits.shape[1:] != (self.source.num_classes,) or not len(images) == len(features) == len(logits):
                raise ValueError("the guard's state is of another model, or damaged")
        self._images, self._outputs, self._labels = images, outputs, state["labels"]
        self.refused, self._blank, self._narrow = state["refused"], state["blank"], state["narrow"]
        self.refusals, self._published = state["refusals"], state["published"]


def _run(model: Classifier, levels: Tensor) -> Outputs:
    with evaluating(model):
        passes = [model.features_and_logits(part.float() / 255) for part in levels.split(PASS)]
    features, logits = zip(*passes, strict=True)
    return Outputs(torch.cat(features), torch.cat(logits))


def _expected_entropies(stats: SourceStatistics | None, num_classes: int) -> Callable[[int], float]:
    """Give the entropy to expect of so many labels of the source: balanced ones, where nothing is known of it."""
    known = stats.origin.counts if stats is not None and stats.origin.samples else (1,) * num_classes
    prior = torch.tensor(known) / sum(known)
    return cache(lambda count: expected_label_entropy(prior, count))


def _compare(
    adapted: Outputs, source: Outputs, distance: AnchorDistance | None, usual_entropy: float, options: GuardOptions
) -> Measures:
    """Measure two models on the same samples, with the limits that the adapted one has to keep."""

    def pair(measure: Callable[[Outputs], float], share: float | None = None) -> dict[str, float | None]:
        mine, its = measure(adapted), measure(source)
        return {"adapted": mine, "source": its, "limit": None if share is None else share * its}

    told = pair(lambda outputs: information(outputs.posteriors), options.information)
    # A source model that is sure and sees all classes is at home and mostly right: who differs much is wrong. Where it
    # is lost, a good model has to differ from it.
    at_home = told["source"] is not None and told["source"] >= options.information * usual_entropy
    same = float((adapted.labels == source.labels).float().mean())
    return {
        "entropy": pair(lambda outputs: mean_entropy(outputs.posteriors)),
        "balance": pair(lambda outputs: balance(outputs.posteriors)),
        "information": told,
        "agreement": {"adapted": same, "source": None, "limit": options.agreement if at_home else None},
        "norm": pair(lambda outputs: outputs.norm, options.norm),
        "distance": dict.fromkeys(("adapted", "source", "limit"))
        if distance is None
        else pair(lambda outputs: float(distance.of(outputs).mean()), options.distance),
    }


def _reasons(measures: Measures) -> tuple[str, ...]:
    """Say which limits are broken.

    Predictions of few classes and unsure ones both tell less of the samples, and adaptation to a shift makes them tell
    more. It also brings features nearer to the source's, or there is no reason to adapt.
    """
    found = []
    for name, (most, text) in RULES.items():
        mine, its, limit = (measures[name][key] for key in ("adapted", "source", "limit"))
        if mine is not None and limit is not None and (mine > limit if most else mine < limit):
            found.append(text.format(mine=mine, its=its))
    return tuple(found)
