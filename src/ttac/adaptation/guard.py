"""The guard: the frozen source model watches the adapting one on the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ttac.adaptation import measures as measuring
from ttac.adaptation.measures import AnchorDistance, Outputs
from ttac.common.options import Checked, setting
from ttac.common.state import Stateful
from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating
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
class GuardOptions(Checked):
    """When the guard steps in.

    The limits lie between what was measured of a ResNet-20 of 10 classes (docs/deployment.md). Of 128 samples it sees
    4.6 to 10 classes under all corruptions of severity 5, and 1 to 3 in noise, one class, one colour or one image; 0.6
    are 3.9 classes. A source model that a shift confuses may see one class as well, so `narrow` has to be asked for.
    TTAC++ that adapts, also from a corruption back to clean images, is at most 1.2 times as far from the anchors as the
    source model and tells at least 0.93 times as much; on clean images after noise it is 1.7 times as far.
    """

    probes: int = setting(256, "newest samples that both models are compared on", least=LEAST)
    recent: int = setting(128, "newest samples whose predicted classes are counted", least=LEAST)
    narrow: float = setting(0.0, "least entropy of those, as a share of the source's own", least=0, most=0.9)
    information: float = setting(0.8, "least that predictions tell, as a share of the source's", least=0, most=0.9)
    distance: float = setting(1.3, "most distance from the anchors, as a multiple of the source model's", above=1)
    agreement: float = setting(0.5, "least share of equal predictions with a sure source model", least=0, most=0.9)
    norm: float = setting(4.0, "most length of the features, as a multiple of the source model's", above=1)
    rollbacks: int = setting(3, "in a row, after which a refusal is a reset", least=0)


@dataclass(frozen=True)
class GuardReport:
    """What the guard says of a candidate."""

    action: Action  # wait: for more samples; rollback: to the last state that was published; reset: to the source model
    reasons: tuple[str, ...]  # why not publish, in words with numbers
    measures: Measures  # by name: adapted, source, limit
    distances: Distances  # adapted, source: [K] from the anchors; empty without statistics


class Guard(Stateful):
    """Says which samples an adapter may learn from, and whether what it has learned may be published.

    A stream is not learned from while the source model sees hardly more than one class in it: noise, one object in
    front of the camera, a stuck frame. Nor is an image of one colour, ever. A candidate is not published where it does
    worse than the source model on the newest samples, by measures that need no labels.

    A rollback of the adapter leaves the guard as it is: what it knows of the stream stays true, and it counts refusals
    in a row. It has to be told what was `published`, as not all that it lets pass can be. `state` is for restarts.
    """

    refused: str | None
    refusals: int
    _blank: int
    _narrow: bool
    _labels: Tensor
    _probes: dict[str, Tensor]
    _published: dict[str, Tensor] | None

    growing = ("_labels",)

    def __init__(self, source: Classifier, stats: SourceStatistics | None, options: GuardOptions | None = None) -> None:
        self.options = options or GuardOptions()
        self.source = source.copy().eval().requires_grad_(False)
        self._distance = None if stats is None else AnchorDistance(stats.to(source.device))
        # Entropies to expect of so many labels of the source: balanced ones, where nothing is known of it.
        known = stats.origin.counts if stats is not None and stats.origin.samples else (1,) * source.num_classes
        prior = torch.tensor(known) / sum(known)
        self._expected = cache(lambda count: measuring.expected_label_entropy(prior, count))
        self.declare(
            refused=lambda: None,  # why the stream is not learned from; not said of single images
            refusals=lambda: 0,  # of candidates, in a row
            _blank=lambda: 0,  # images of one colour in a row
            _narrow=lambda: False,
            _labels=lambda: torch.empty(0, dtype=torch.int64),  # [<= recent] that the source model predicted
            _probes=dict,  # [<= probes, ...] images (uint8), and features and logits of the source model; or nothing
            _published=lambda: None,  # weights; None: those of the source model
        )

    @torch.no_grad()
    def admit(self, images: Tensor) -> Tensor:
        """Note images `[n, C, H, W]` of the stream, and give those that may be learned from."""
        levels = (self.source.check(images) * 255).round().clamp(0, 255).byte()
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
        found, usual = measuring.label_entropy(self._labels), self._expected(count)
        limit = self.options.narrow * usual * (RELEASE if self._narrow else 1)
        self._narrow = found < limit
        if self._narrow:
            self.refused = (
                f"the source model sees {math.exp(found):.1f} classes in the last {count} samples, "
                f"fewer than {math.exp(limit):.1f}"
            )

    def _note_probes(self, levels: Tensor, outputs: Outputs) -> None:
        newest = {"images": levels, **vars(outputs)}
        known = self._probes or {name: tensor[:0] for name, tensor in newest.items()}
        self._probes = {name: torch.cat([known[name], newest[name]])[-self.options.probes :] for name in newest}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, which may have been on another device."""
        self.reset_state()
        super().load_state(state)
        self._probes = {name: tensor.to(self.source.device) for name, tensor in self._probes.items()}
        if self._probes:
            images, features, logits = (self._probes[name] for name in ("images", "features", "logits"))
            if logits.shape[1:] != (self.source.num_classes,) or not len(images) == len(features) == len(logits):
                raise ValueError("the guard's state is of another model, or damaged")

    @torch.no_grad()
    def check(self, candidate: Classifier) -> GuardReport:
        """Compare a candidate with the source model on the newest samples that were admitted."""
        reasons, measures, distances = self._judge(candidate)
        action: Action = "publish"
        if reasons:
            self.refusals += 1
            action = "rollback" if self.refusals <= self.options.rollbacks and self._published_is_sound() else "reset"
        elif len(self._probes.get("images", ())) < LEAST:
            action = "wait"
        if action in ("publish", "reset"):
            self.refusals = 0
        return GuardReport(action, reasons, measures, distances)

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
        if not self._probes:
            return (), {}, {}
        adapted, source = _run(model, self._probes["images"]), Outputs(self._probes["features"], self._probes["logits"])
        if not bool(adapted.features.isfinite().all() and adapted.logits.isfinite().all()):
            return ("its outputs are not finite",), {}, {}
        measures = self._compare(adapted, source)
        distances: Distances = {}
        if self._distance is not None:
            distances = {"adapted": self._distance.by_class(adapted), "source": self._distance.by_class(source)}
        return _reasons(measures) if len(source) >= LEAST else (), measures, distances

    def _compare(self, adapted: Outputs, source: Outputs) -> Measures:
        """Measure two models on the same samples, with the limits that the adapted one has to keep."""

        options, distance = self.options, self._distance

        def pair(measure: Callable[[Outputs], float], share: float | None = None) -> dict[str, float | None]:
            mine, its = measure(adapted), measure(source)
            return {"adapted": mine, "source": its, "limit": None if share is None else share * its}

        told = pair(lambda outputs: measuring.information(outputs.posteriors), options.information)
        # A source model that is sure and sees all classes is at home and mostly right: who differs much is wrong.
        # Where it is lost, a good model has to differ from it.
        at_home = told["source"] is not None and told["source"] >= options.information * self._expected(len(source))
        same = float((adapted.labels == source.labels).float().mean())
        return {
            "entropy": pair(lambda outputs: measuring.mean_entropy(outputs.posteriors)),
            "balance": pair(lambda outputs: measuring.balance(outputs.posteriors)),
            "information": told,
            "agreement": {"adapted": same, "source": None, "limit": options.agreement if at_home else None},
            "norm": pair(lambda outputs: float(outputs.features.float().norm(dim=1).mean()), options.norm),
            "distance": dict.fromkeys(("adapted", "source", "limit"))
            if distance is None
            else pair(lambda outputs: float(distance.of(outputs).mean()), options.distance),
        }


def _run(model: Classifier, levels: Tensor) -> Outputs:
    images = [part.float() / 255 for part in levels.split(PASS)]
    with evaluating(model):
        if not model.has_linear_head:  # and so no features to compare
            logits = torch.cat([model(part) for part in images])
            return Outputs(logits[:, :0], logits)
        outputs = [model.features_and_logits(part) for part in images]
    return Outputs(*(torch.cat(parts) for parts in zip(*outputs, strict=True)))


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
