"""SHOT: information maximisation and centroid pseudo labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.adaptation.losses import diversity, entropy
from ttac.methods.base import Capabilities, require
from ttac.methods.registry import register
from ttac.methods.windows import GradientAdapter, GradientOptions, Trial

UNKNOWN = -1  # the label of a sample that no epoch has labelled


@dataclass(frozen=True)
class ShotOptions(GradientOptions):
    """The published defaults; a weight of 0 switches a loss off."""

    lr: float | None = 1e-3  # 1e-2, of which the published backbone takes a tenth
    weight_decay: float = 1e-3
    entropy_weight: float = 1.0
    diversity_weight: float = 1.0
    label_weight: float = 0.3  # of the cross-entropy with centroid pseudo labels
    threshold: int = 0  # only classes with more samples than this have a centroid that attracts

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.weight_decay >= 0, "weight_decay must not be negative", self.weight_decay)
        for name in ("entropy_weight", "diversity_weight", "label_weight"):
            require(getattr(self, name) >= 0, f"{name} must not be negative", getattr(self, name))
        require(self.threshold >= 0, "threshold must not be negative", self.threshold)


def centroid_labels(features: Tensor, posterior: Tensor, *, threshold: int = 0) -> Tensor:
    """Label `features [N, D]` by the centroid of smallest cosine distance: `[N]`.

    Centroids are weighted by `posterior [N, K]` first, and then by the labels that those gave.

    >>> features = torch.tensor([[4.0, 0.0], [5.0, 0.5], [0.0, 3.0], [0.6, 2.0]])
    >>> posterior = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.6, 0.4]])
    >>> centroid_labels(features, posterior)
    tensor([0, 0, 1, 1])
    """
    # A sample that overflowed the network must not move the centroids of the others.
    features, posterior = (tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in (features, posterior))
    features = F.normalize(torch.cat([features, torch.ones_like(features[:, :1])], 1), dim=1)
    weights, labels = posterior.to(features), posterior.argmax(1)
    for _ in range(2):
        centroids = F.normalize(weights.T @ features, dim=1)  # sums do as means: a cosine ignores lengths
        counts = labels.bincount(minlength=posterior.shape[1])
        few = counts <= counts.max().clamp_max(threshold + 1) - 1  # not the largest class, however few it has
        labels = (features @ centroids.T).masked_fill(few, -torch.inf).argmax(1)
        weights = F.one_hot(labels, posterior.shape[1]).to(features)
    return labels


@register
class Shot(GradientAdapter):
    """Make posteriors sharp and classes evenly used, and hold samples to the centroids of their own clusters.

    One pass: every update labels the samples that its queue holds, by the model as it is. Several passes: every epoch
    labels the whole target set first, as published, and a sample keeps that label until it leaves the queue. Images are
    learned from as they come; the publication mirrors and crops them on objects, and does neither on digits.
    """

    capabilities = Capabilities(
        name="shot",
        title="SHOT",
        protocols=("N-O-SF", "N-M-SF"),
        needs=(),
        changes="backbone, batch-norm statistics",
        citation="Liang et al., Do We Really Need to Access the Source Data?, ICML 2020",
    )
    options_type = ShotOptions
    options: ShotOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "office": {"window": 64},
        "office-partial": {"window": 64, "diversity_weight": 0.0, "threshold": 10},
        "visda": {"window": 64, "lr": 1e-4},
        "digits": {"window": 64, "lr": 1e-2, "label_weight": 0.1},
    }

    def _make_optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        momentum, decay = self.options.momentum, self.options.weight_decay
        return torch.optim.SGD(values, momentum=momentum, weight_decay=decay, nesterov=momentum > 0)

    def _begin(self) -> None:
        super()._begin()
        device = self.classifier.mean.device
        self.labels = torch.full((self.queue.capacity,), UNKNOWN, device=device)  # of the queue's slots
        self.targets = self.labels  # with those that the running update found for itself
        self.coming = self.labels[:0]  # of samples that no update has taken yet: those that wait, then the epoch's rest
        self.course: dict[str, int] | None = None  # the epoch, and how many samples and epochs there are

    def _begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        waiting = _padded(self.coming, self.queue.fresh)
        found = self._find_labels(target)
        self.coming = torch.cat([waiting, found])
        self.course = {"epoch": epoch, "epochs": epochs, "samples": len(found)}

    def _update(self) -> Tensor | None:
        window = self.options.window
        given, self.coming = self.coming[:window], self.coming[window:]
        if not len(given):
            self.course = None
        self.labels[self.queue.newest(window)] = _padded(given, window)
        self.targets = self.labels[: len(self.queue)]
        unknown = self.targets == UNKNOWN
        if self.options.label_weight and bool(unknown.any()):
            parts = torch.arange(len(self.queue)).split(window)
            found = self._find_labels(self.queue.take(slots) for slots in parts)
            self.targets = torch.where(unknown, found, self.targets)
        return super()._update()

    def _rate(self) -> float:
        rate = super()._rate()
        if self.course is None:
            return rate
        share = 1 - len(self.coming) / self.course["samples"]
        progress = (self.course["epoch"] + share) / self.course["epochs"]
        return rate * (1 + 10 * progress) ** -0.75

    @torch.no_grad()
    def _find_labels(self, batches: Iterable[Tensor]) -> Tensor:
        """Label the images of `batches` by the centroids of all of them, the model in eval mode."""
        pieces = (piece for images in batches for piece in images.split(self.options.window))
        outputs = [self.classifier.features_and_logits(piece) for piece in pieces]
        if not outputs:
            return self.labels[:0]
        features, logits = (torch.cat(parts).float() for parts in zip(*outputs, strict=True))
        return centroid_labels(features, logits.softmax(1), threshold=self.options.threshold)

    def _try(self, slots: Tensor, number: int) -> Trial:
        options = self.options
        with self.tracker.following(len(slots)):
            logits = self.classifier(self.queue.take(slots))
        losses = {}
        if options.entropy_weight:
            losses["entropy"] = options.entropy_weight * entropy(logits)
        if options.diversity_weight:
            losses["diversity"] = -options.diversity_weight * diversity(logits)
        if options.label_weight:
            losses["pseudo_label"] = options.label_weight * F.cross_entropy(logits, self.targets[slots])
        return Trial(losses, logits)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "labels": self.labels, "coming": self.coming, "course": self.course}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self.labels.copy_(state["labels"])
        self.coming, self.course = state["coming"], state["course"]


def _padded(labels: Tensor, count: int) -> Tensor:
    """Take the first `count` labels, unknown ones where there are fewer."""
    return F.pad(labels[:count], (0, max(0, count - len(labels))), value=UNKNOWN)
