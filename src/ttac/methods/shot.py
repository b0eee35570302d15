"""SHOT: information maximisation and centroid pseudo labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.losses import diversity, entropy
from ttac.adaptation.method import Batch, Capabilities, Method, backbone
from ttac.adaptation.options import GradientOptions
from ttac.adaptation.step import Loss
from ttac.common.options import setting
from ttac.methods.registry import register

UNKNOWN = -1  # the label of a sample that no epoch has labelled


@dataclass(frozen=True)
class ShotOptions(GradientOptions):
    """The published defaults; a weight of 0 switches a loss off."""

    lr: float | None = setting(1e-3, "rate of every step: 1e-2, of which the published backbone takes a tenth", above=0)
    weight_decay: float = setting(1e-3, "of SGD", least=0)
    entropy_weight: float = setting(1.0, "of the posteriors' mean entropy", least=0)
    diversity_weight: float = setting(1.0, "of the entropy of the mean posterior", least=0)
    label_weight: float = setting(0.3, "of the cross-entropy with centroid pseudo labels", least=0)
    threshold: int = setting(0, "only classes with more samples than this have a centroid that attracts", least=0)


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
class Shot(Method):
    """Make posteriors sharp and classes evenly used, and hold samples to the centroids of their own clusters.

    One pass: every update labels the samples that its queue holds, by the weights as they are and the batch-norm
    statistics that have followed the window, with which it will be predicted. Several passes: every epoch labels the
    whole target set first, with the statistics that the epoch before has left (the first: the source's), as published,
    and a sample keeps that label until it leaves the queue. Images are learned from as they come; the publication
    mirrors and crops them on objects, and does neither on digits.
    """

    capabilities = Capabilities(
        "shot",
        "SHOT",
        ("N-O-SF", "N-M-SF"),
        changes="backbone, batch-norm statistics",
        citation="Liang et al., Do We Really Need to Access the Source Data?, ICML 2020",
    )
    options_type = ShotOptions
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "office": {"window": 64},
        "office-partial": {"window": 64, "diversity_weight": 0.0, "threshold": 10},
        "visda": {"window": 64, "lr": 1e-4},
        "digits": {"window": 64, "lr": 1e-2, "label_weight": 0.1},
    }
    growing = ("coming",)
    coming: Tensor
    course: dict[str, int] | None

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.targets = torch.empty(0, dtype=torch.int64)  # of the running update: labels of the queue's slots
        self.declare(
            # Of samples that no update has taken yet: those that wait, then the epoch's rest.
            coming=lambda: torch.empty(0, dtype=torch.int64, device=self.classifier.device),
            course=lambda: None,  # the epoch, and how many samples and epochs there are
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        return backbone(self.classifier)

    def optimizer(self, values: list[Tensor]) -> torch.optim.Optimizer:
        options = self.adapter.options
        momentum, decay = options.momentum, options.weight_decay
        return torch.optim.SGD(values, momentum=momentum, weight_decay=decay, nesterov=momentum > 0)

    def columns(self) -> dict[str, Tensor]:
        return {"label": torch.tensor(UNKNOWN)}

    def begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        """Label the whole target set."""
        waiting = _padded(self.coming, self.adapter.memory_in_use.fresh)
        found = self._find_labels(target)
        self.coming = torch.cat([waiting, found])
        self.course = {"epoch": epoch, "epochs": epochs, "samples": len(found)}

    def before_update(self) -> None:
        """Label the samples of the memory that no epoch has labelled."""
        memory, window = self.adapter.memory_in_use, self.adapter.options.window
        given, self.coming = self.coming[: memory.fresh], self.coming[memory.fresh :]
        if not len(given):
            self.course = None
        memory.remember(memory.newest(memory.fresh), {"label": _padded(given, memory.fresh)})
        self.targets = memory.columns["label"][: len(memory)]
        unknown = self.targets == UNKNOWN
        if self.adapter.options.label_weight and bool(unknown.any()):
            parts = torch.arange(len(memory)).split(window)
            with self._followed(memory.take(memory.newest(window))):
                found = self._find_labels(memory.take(slots) for slots in parts)
            self.targets = torch.where(unknown, found, self.targets)

    def rate(self) -> float:
        """Let the rate fall over the epochs of a multi-pass protocol, as published."""
        rate = super().rate()
        if self.course is None:
            return rate
        share = 1 - len(self.coming) / self.course["samples"]
        progress = (self.course["epoch"] + share) / self.course["epochs"]
        return rate * (1 + 10 * progress) ** -0.75

    @contextmanager
    def _followed(self, images: Tensor) -> Iterator[None]:
        """Let the batch-norm statistics have followed a window of images for a while; the steps move them for good.

        Before the first window they are the source's, and labels would be of a model that predicts nothing here.
        """
        norms = self.adapter.norms
        before = norms.snapshot()
        try:
            with torch.no_grad(), norms.following(len(images)):
                self.adapter.view(images)
            finite = norms.finite()
            if finite is not None and not bool(finite):  # one sample that overflows must not cost all their labels
                norms.restore(before)
            yield
        finally:
            norms.restore(before)

    @torch.no_grad()
    def _find_labels(self, batches: Iterable[Tensor]) -> Tensor:
        """Label the images of `batches` by the centroids of all of them, the model in eval mode."""
        options = self.adapter.options
        pieces = (piece for images in batches for piece in images.split(options.window))
        outputs = [self.classifier.features_and_logits(piece) for piece in pieces]
        if not outputs:
            return self.coming[:0]
        features, logits = (torch.cat(parts).float() for parts in zip(*outputs, strict=True))
        return centroid_labels(features, logits.softmax(1), threshold=options.threshold)

    def losses(self, batch: Batch) -> dict[str, Loss]:
        options = self.adapter.options
        logits = batch.forward().logits
        losses: dict[str, Loss] = {}
        if options.entropy_weight:
            losses["entropy"] = options.entropy_weight * entropy(logits)
        if options.diversity_weight:
            losses["diversity"] = -options.diversity_weight * diversity(logits)
        if options.label_weight:
            losses["pseudo_label"] = options.label_weight * F.cross_entropy(logits, self.targets[batch.slots])
        return losses


def _padded(labels: Tensor, count: int) -> Tensor:
    """Take the first `count` labels, unknown ones where there are fewer."""
    return F.pad(labels[:count], (0, max(0, count - len(labels))), value=UNKNOWN)
