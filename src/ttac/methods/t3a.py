"""T3A: prototypes of the head made of the surest features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.methods.base import Capabilities, Moment, require
from ttac.methods.registry import register
from ttac.methods.windows import WindowAdapter, WindowOptions
from ttac.model.classifier import Classifier


@dataclass(frozen=True)
class T3AOptions(WindowOptions):
    """The published defaults; a sample is a support once, so `queue` and `passes` serve the statistics of `follow`."""

    predict: Moment = "during"  # as published: by the prototypes that the window is already in
    keep: int | None = 100  # surest supports of a class, M; None: all of them, and memory grows with the stream
    follow: bool = False  # whether batch-norm statistics follow the stream first; the publication leaves them

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.keep is None or self.keep >= 1, "keep must be at least 1, or None for all supports", self.keep)


def surest(entropies: Tensor, labels: Tensor, keep: int) -> Tensor:
    """Find the `keep` supports of lowest entropy of each label, the earlier of two equal ones, in order of arrival.

    >>> surest(torch.tensor([0.3, 0.1, 0.2, 0.1]), torch.tensor([0, 0, 0, 1]), keep=2)
    tensor([1, 2, 3])
    """
    order = entropies.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]  # by label, then by entropy, then by arrival
    counts = labels.bincount()
    ranks = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[labels[order]]
    return order[ranks < keep].sort().values


@register
class T3A(WindowAdapter):
    """Replace the head by prototypes, which are the head's own rows and the features that it is surest of.

    Supports enter a window at a time, as the features of one image differ in the last bits with the batch they are
    computed in. Where windows arrive whole this is the published order: add the batch, then predict it.
    """

    capabilities = Capabilities(
        name="t3a",
        title="T3A",
        protocols=("N-O-SF",),
        needs=(),
        changes="head prototypes; with follow, batch-norm statistics",
        citation="Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization, "
        "NeurIPS 2021",
    )
    options_type = T3AOptions
    options: T3AOptions

    @property
    def exempt(self) -> dict[str, str]:
        """Memory has no bound where all supports are kept."""
        return {"memory_plateaus": "keep=None keeps every support"} if self.options.keep is None else {}

    def _begin(self) -> None:
        super()._begin()
        head = self.classifier.head
        rows = head.weight.detach()
        self.dropped = self.refused = 0
        wide = torch.promote_types(rows.dtype, torch.float32)
        self.supports = rows.new_empty(0, head.in_features, dtype=wide)  # [M, D]
        self.entropies = self.supports.new_empty(0)  # [M]
        self.labels = torch.empty(0, dtype=torch.int64, device=rows.device)  # [M]
        # As published, a row counts for the class that the head gives it, which with a bias or rows of unlike length
        # may be another one than its own.
        with torch.no_grad():
            self._add(rows, self.classifier.logits(rows))

    def _step(self, slots: Tensor, number: int) -> Tensor:
        with torch.no_grad(), self.tracker.following(len(slots)):
            logits: Tensor = self.classifier(self.queue.take(slots))
        return logits

    @torch.no_grad()
    def _update(self) -> Tensor | None:
        if self.options.follow:
            super()._update()
        window = self.queue.take(self.queue.newest(self.options.window))
        features, logits = self.classifier.features_and_logits(window)
        self._add(features, logits)
        scores = self._score(features)
        return scores if bool(scores.isfinite().all()) else None

    def _add(self, features: Tensor, logits: Tensor) -> None:
        """Make supports of `features [n, D]`, with the labels and entropies of the head's `logits [n, K]`."""
        finite = features.isfinite().all(1) & logits.isfinite().all(1)
        features, logits = features[finite].to(self.supports), logits[finite].to(self.supports)
        log_posterior = logits.log_softmax(1)
        self.supports = torch.cat([self.supports, F.normalize(features, dim=1)])
        self.entropies = torch.cat([self.entropies, -(log_posterior.exp() * log_posterior).sum(1)])
        self.labels = torch.cat([self.labels, logits.argmax(1)])
        self.refused += int((~finite).sum())
        if self.options.keep is not None:
            kept = surest(self.entropies, self.labels, self.options.keep)
            self.dropped += len(self.labels) - len(kept)
            self.supports, self.entropies, self.labels = self.supports[kept], self.entropies[kept], self.labels[kept]
        self._make_prototypes()

    def _make_prototypes(self) -> None:
        sums = self.supports.new_zeros(self.classifier.num_classes, self.classifier.feature_dim)
        self.prototypes = F.normalize(sums.index_add_(0, self.labels, self.supports), dim=1)  # [K, D]

    def _score(self, features: Tensor) -> Tensor:
        return features.to(self.prototypes) @ self.prototypes.T

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict with the prototypes as they are and change nothing: `[N, C, H, W] -> [N, K]`."""
        return self._score(self.classifier.features(self.classifier.check(images)))

    def adapted(self) -> Classifier:
        """Give a copy of the classifier whose head is the prototypes, without a bias."""
        copy = self.classifier.copy()
        with torch.no_grad():
            copy.head.weight.copy_(self.prototypes)
            if copy.head.bias is not None:
                copy.head.bias.zero_()
        return copy

    def counters(self) -> dict[str, int]:
        """Count what has happened since the last reset; the head's rows are supports too."""
        counts = {"supports": len(self.labels), "dropped_supports": self.dropped, "refused_supports": self.refused}
        return {**super().counters(), **counts}

    def _state(self) -> dict[str, Any]:
        tensors = {"supports": self.supports, "entropies": self.entropies, "labels": self.labels}
        return {**super()._state(), **tensors, "dropped": self.dropped, "refused": self.refused}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self.supports, self.entropies, self.labels = state["supports"], state["entropies"], state["labels"]
        self.dropped, self.refused = state["dropped"], state["refused"]
        self._make_prototypes()
