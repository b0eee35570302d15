"""T3A: prototypes of the head made of the surest features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.adaptation.answers import Answers
from ttac.adaptation.method import Batch, Capabilities, Method
from ttac.adaptation.options import WindowOptions
from ttac.adaptation.step import Loss
from ttac.common.options import setting
from ttac.methods.registry import register
from ttac.model.classifier import Classifier


@dataclass(frozen=True)
class T3AOptions(WindowOptions):
    """The published defaults; a sample is a support once, so `queue` and `passes` serve the statistics of `follow`."""

    keep: int | None = setting(100, "surest supports of a class, M; None: all, without a bound", least=1)
    follow: bool = setting(False, "whether batch-norm statistics follow the stream first; the publication leaves them")


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


@dataclass(frozen=True, eq=False)
class Supports:
    """What prototypes are made of."""

    features: Tensor  # [M, D], of length 1
    entropies: Tensor  # [M]
    labels: Tensor  # [M]


class PrototypeAnswers(Answers):
    """Predictions by the prototypes of a head, which are its own rows and the features that it is surest of."""

    growing = ("supports",)
    supports: Supports
    dropped: int
    refused: int

    def __init__(self, classifier: Classifier, keep: int | None) -> None:
        super().__init__(classifier)
        self.keep = keep
        self.declare(dropped=lambda: 0, refused=lambda: 0, supports=self._rows)

    @torch.no_grad()
    def _rows(self) -> Supports:
        """Make the head's own rows the first supports.

        As published, a row counts for the class that the head gives it, which with a bias or rows of unlike length may
        be another one than its own.
        """
        rows = self.classifier.head.weight.detach()
        nothing = rows.new_empty(0, dtype=torch.promote_types(rows.dtype, torch.float32))
        blank = Supports(nothing.reshape(0, rows.shape[1]), nothing, nothing.long())
        return self._joined(blank, rows, self.classifier.logits(rows))

    def _joined(self, supports: Supports, features: Tensor, logits: Tensor) -> Supports:
        """Add `features [n, D]`, with the labels and entropies of the head's `logits [n, K]`, and keep the surest."""
        finite = features.isfinite().all(1) & logits.isfinite().all(1)
        features, logits = features[finite].to(supports.features), logits[finite].to(supports.features)
        log_posterior = logits.log_softmax(1)
        everything = Supports(
            torch.cat([supports.features, F.normalize(features, dim=1)]),
            torch.cat([supports.entropies, -(log_posterior.exp() * log_posterior).sum(1)]),
            torch.cat([supports.labels, logits.argmax(1)]),
        )
        self.refused += int((~finite).sum())
        if self.keep is None:
            return everything
        kept = surest(everything.entropies, everything.labels, self.keep)
        self.dropped += len(everything.labels) - len(kept)
        return Supports(*(tensor[kept] for tensor in vars(everything).values()))

    @torch.no_grad()
    def add(self, features: Tensor, logits: Tensor) -> None:
        """Make supports of `features [n, D]` that the head gives `logits [n, K]`."""
        self.supports = self._joined(self.supports, features, logits)

    @property
    def prototypes(self) -> Tensor:
        """The mean directions of the supports of each class: `[K, D]`."""
        supports = self.supports
        sums = supports.features.new_zeros(self.classifier.num_classes, self.classifier.feature_dim)
        return F.normalize(sums.index_add_(0, supports.labels, supports.features), dim=1)

    def score(self, features: Tensor) -> Tensor:
        """Compare features `[n, D]` with the prototypes: `[n, K]`."""
        prototypes = self.prototypes
        return features.to(prototypes) @ prototypes.T

    def predict(self, images: Tensor) -> Tensor:
        return self.score(self.classifier.features(images))

    def adapted(self) -> Classifier:
        """Give a copy of the classifier whose head is the prototypes, without a bias."""
        copy = self.classifier.copy()
        with torch.no_grad():
            copy.head.weight.copy_(self.prototypes)
            if copy.head.bias is not None:
                copy.head.bias.zero_()
        return copy


@register
class T3A(Method):
    """Replace the head by prototypes.

    Supports enter a window at a time, as the features of one image differ in the last bits with the batch they are
    computed in. Where windows arrive whole this is the published order: add the batch, then predict it. Nothing is
    stepped, so during and after an update are the same prototypes.
    """

    capabilities = Capabilities(
        "t3a",
        "T3A",
        ("N-O-SF",),
        changes="head prototypes; with follow, batch-norm statistics",
        citation="Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization, "
        "NeurIPS 2021",
    )
    options_type = T3AOptions
    checked_with: ClassVar[Mapping[str, Any]] = {"keep": 2}
    guardable = False  # cosines are no logits

    @property
    def exempt(self) -> dict[str, str]:
        """Memory has no bound where all supports are kept."""
        return {"memory_plateaus": "keep=None keeps every support"} if self.adapter.options.keep is None else {}

    def answers(self) -> PrototypeAnswers:
        return PrototypeAnswers(self.classifier, self.adapter.options.keep)

    @property
    def prototypes(self) -> PrototypeAnswers:
        """What predicts."""
        answers = self.adapter.answers
        assert isinstance(answers, PrototypeAnswers)
        return answers

    def passes(self) -> int:
        """Walk the memory only where the batch-norm statistics are to follow it."""
        return super().passes() if self.adapter.options.follow else 0

    def losses(self, batch: Batch) -> dict[str, Loss]:
        with torch.no_grad():
            batch.forward()
        return {}

    @torch.no_grad()
    def after_update(self, newest: Tensor, logits: Tensor) -> Tensor:
        """Make supports of the window, and predict it by them."""
        features, logits = self.classifier.features_and_logits(self.adapter.memory_in_use.take(newest))
        self.prototypes.add(features, logits)
        return self.prototypes.score(features)

    def counters(self) -> dict[str, int]:
        """Count supports, the head's rows among them."""
        found = self.prototypes
        return {
            "supports": len(found.supports.labels),
            "dropped_supports": found.dropped,
            "refused_supports": found.refused,
        }
