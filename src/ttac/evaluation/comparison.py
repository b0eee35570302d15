"""What adaptation bought: the frozen model, BN and the adapting model on the same images; labels are not needed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.measures import AnchorDistance, Outputs, mean_entropy
from ttac.common.state import Stateful
from ttac.evaluation.metrics import ErrorMeter
from ttac.methods.registry import adapt
from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating

FROZEN, BN, ADAPTED = "frozen", "bn", "adapted"
SHOWN = 48  # changed predictions that are kept: the most confident ones
PROBES = 256  # newest images, of which distances to the anchors are told
PASS = 64  # of them in a forward pass


class Change(NamedTuple):
    """An image that the adapting model takes for something else than the frozen model does."""

    file: str
    before: int
    before_confidence: float
    after: int
    confidence: float
    truth: int | None


class Tally(Stateful):
    """What one model has said of the images, each when it came."""

    samples: int
    seconds: float
    confidence: float  # sums over the images
    entropy: float
    counts: Tensor  # [K], of predicted classes
    differing: dict[str, int]  # predictions unlike those of another model, by its name
    errors: ErrorMeter

    def __init__(self, num_classes: int, others: Sequence[str]) -> None:
        meter = ErrorMeter(num_classes)
        self.declare(
            samples=lambda: 0,
            seconds=lambda: 0.0,
            confidence=lambda: 0.0,
            entropy=lambda: 0.0,
            counts=lambda: torch.zeros(num_classes, dtype=torch.int64),
            differing=lambda: dict.fromkeys(others, 0),
            errors=lambda: meter,
        )

    def add(self, posteriors: Tensor, truth: Tensor | None) -> None:
        """Count the posteriors `[N, K]` of a batch, and its true labels `[N]` where they are known."""
        confidence, labels = posteriors.max(1)
        self.samples += len(posteriors)
        self.confidence += float(confidence.sum())
        self.entropy += mean_entropy(posteriors) * len(posteriors)
        self.counts += torch.bincount(labels, minlength=len(self.counts))
        if truth is not None:
            self.errors.update(labels, truth)

    def summary(self) -> dict[str, Any]:
        """Give means over the images; None for what is not finite."""
        shares = self.counts.double() / self.samples
        return {
            "confidence": _finite(self.confidence / self.samples),
            "entropy": _finite(self.entropy / self.samples),  # nats
            "classes_in_use": math.exp(float(torch.special.entr(shares).sum())),
            "counts": self.counts.tolist(),
            "differs_from": {name: count / self.samples for name, count in self.differing.items()},
            "error": self.errors.compute() if self.errors.curve else None,  # percent
            "seconds_an_image": self.seconds / self.samples,
        }


class Comparison(Stateful):
    """Runs the frozen model and BN beside an adapter, and counts what all of them say.

    BN is the method `bn` with the adapter's window. An adapter that is BN itself is compared with the frozen model, and
    one without `frozen` with nothing.
    """

    tallies: dict[str, Tally]
    changes: list[tuple[Any, ...]]  # plain tuples, as a checkpoint keeps plain values alone

    def __init__(self, adapter: Adapter, frozen: Classifier | None) -> None:
        self.adapter, self.frozen = adapter, frozen
        self.bn: Adapter | None = None
        if frozen is not None and adapter.name != BN:
            window = {"window": adapter.options.window} if hasattr(adapter.options, "window") else {}
            self.bn = adapt(frozen, BN, **window)
        there = {FROZEN: frozen is not None, BN: self.bn is not None, ADAPTED: True}
        names = [name for name, is_there in there.items() if is_there]
        classes = adapter.classifier.num_classes
        tallies = {name: Tally(classes, [other for other in names if other != name]) for name in names}
        self.declare(tallies=lambda: tallies, changes=list)

    def add(
        self, images: Tensor, files: Sequence[str], logits: Tensor, labels: Mapping[str, int], *, last: bool
    ) -> None:
        """Count an arrival batch that the adapter has answered with `logits [N, K]`; `labels` by file, if known."""
        truth = torch.tensor([labels[name] for name in files]) if labels else None
        outputs = {ADAPTED: logits}
        if self.frozen is not None:
            started = time.perf_counter()
            with evaluating(self.frozen), torch.no_grad():
                outputs[FROZEN] = self.frozen(self.frozen.check(images))
            self.tallies[FROZEN].seconds += time.perf_counter() - started
        if self.bn is not None:
            started = time.perf_counter()
            outputs[BN] = self.bn(images, last=last)
            self.tallies[BN].seconds += time.perf_counter() - started
        posteriors = {name: output.detach().double().softmax(1).cpu() for name, output in outputs.items()}
        predicted = {name: found.argmax(1) for name, found in posteriors.items()}
        for name, tally in self.tallies.items():
            tally.add(posteriors[name], truth)
            for other in tally.differing:
                tally.differing[other] += int((predicted[name] != predicted[other]).sum())
        if self.frozen is not None:
            self._note_changes(files, posteriors[FROZEN], posteriors[ADAPTED], truth)

    def _note_changes(self, files: Sequence[str], before: Tensor, after: Tensor, truth: Tensor | None) -> None:
        (old_shares, old), (shares, new) = (found.max(1) for found in (before, after))
        for row in (old != new).nonzero().flatten().tolist():
            label = None if truth is None else int(truth[row])
            change = Change(files[row], int(old[row]), float(old_shares[row]), int(new[row]), float(shares[row]), label)
            self.changes.append(tuple(change))
        self.changes.sort(key=lambda change: -Change(*change).confidence)  # stable: of equal ones, the first to come
        del self.changes[SHOWN:]

    def summary(self, seconds: float) -> dict[str, Any]:
        """Sum up, with the `seconds` that the adapter took for all images; plain values, for a record."""
        self.tallies[ADAPTED].seconds = seconds
        found = {name: tally.summary() for name, tally in self.tallies.items()}
        for name, distance in self._distances().items():
            found[name]["anchor_distance"] = _finite(distance)
        return {"images": self.tallies[ADAPTED].samples, "models": found}

    def _distances(self) -> dict[str, float]:
        """Tell how far the newest images are from the anchors by each model as it is now; nothing without anchors."""
        stats, memory = self.adapter.stats, self.adapter.memory
        if stats is None or memory is None or not len(memory):
            return {}
        anchors = AnchorDistance(stats.to(self.adapter.classifier.device))
        images = memory.take(memory.newest(PROBES))
        bn = None if self.bn is None else self.bn.classifier
        models = {FROZEN: self.frozen, BN: bn, ADAPTED: self.adapter.adapted()}
        found = {}
        for name, model in models.items():
            if model is not None:
                with evaluating(model), torch.no_grad():
                    parts = [Outputs(*model.features_and_logits(part)) for part in images.split(PASS)]
                found[name] = float(torch.cat([anchors.of(outputs) for outputs in parts]).mean())
        return found

    @property
    def errors(self) -> ErrorMeter:
        """The errors of the adapter, by the labels that were given."""
        return self.tallies[ADAPTED].errors

    # For checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Give all that the stream has made of it, BN's state too."""
        return {"counted": self.state(), "bn": None if self.bn is None else self.bn.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.load_state(state["counted"])
        if self.bn is not None:
            self.bn.load_state_dict(state["bn"])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
