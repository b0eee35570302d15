"""What the guard measures of models and of streams: pure functions of posteriors, labels and features."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ttac.gaussian import RIDGE
from ttac.source.statistics import SourceStatistics


@dataclass(frozen=True)
class Outputs:
    """What a model makes of some samples."""

    features: Tensor  # [n, D]
    logits: Tensor  # [n, K]

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def posteriors(self) -> Tensor:
        """The posteriors in single precision: `[n, K]`."""
        return self.logits.float().softmax(1)

    @property
    def labels(self) -> Tensor:
        """The predicted classes: `[n]`."""
        return self.logits.argmax(1)


def mean_entropy(posteriors: Tensor) -> float:
    """Compute the mean entropy of posteriors `[n, K]`, in nats.

    >>> round(mean_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]])), 4)
    0.3466
    """
    return float(torch.special.entr(posteriors.double()).sum(1).mean())


def balance(posteriors: Tensor) -> float:
    """Compute how many equally frequent classes would spread as the mean of posteriors `[n, K]` does: 1 to K.

    >>> round(balance(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])), 4)
    2.0
    """
    return math.exp(float(torch.special.entr(posteriors.double().mean(0)).sum()))


def information(posteriors: Tensor) -> float:
    """Compute what predictions tell of the samples, `H(mean p) - mean H(p)` in nats: sure and various ones tell most.

    >>> round(information(torch.eye(4)), 4), abs(information(torch.full((3, 4), 0.25))) < 1e-6
    (1.3863, True)
    """
    return math.log(balance(posteriors)) - mean_entropy(posteriors)


def label_entropy(labels: Tensor) -> float:
    """Compute the entropy of the shares that classes have of labels `[n]`, in nats.

    >>> round(label_entropy(torch.tensor([3, 3, 1, 1])), 4)
    0.6931
    """
    shares = torch.unique(labels, return_counts=True)[1].double() / len(labels)
    return float(torch.special.entr(shares).sum())


def expected_label_entropy(prior: Tensor, count: int) -> float:
    """Compute what `label_entropy` is on average of `count` labels drawn from the shares `prior [K]`.

    It is `sum_k E[-(x / n) log(x / n)]` with `x` of the binomial distribution `(n, p_k)`: few samples of many classes
    show few of them, and must not look narrow for that.

    >>> round(expected_label_entropy(torch.tensor([0.5, 0.5]), 2), 4)  # half of all pairs are equal
    0.3466
    """
    shares, classes = torch.unique(prior.double(), return_counts=True)  # mostly one, or a few
    seen = torch.arange(count + 1, dtype=torch.float64)
    term = torch.special.entr(seen / count)
    total = 0.0
    for share, number in zip(shares.tolist(), classes.tolist(), strict=True):
        chances = torch.distributions.Binomial(count, torch.tensor(share, dtype=torch.float64)).log_prob(seen).exp()
        total += number * float(chances @ term)
    return total


class AnchorDistance:
    """How far samples are from the anchor of the class that a model puts them in: 1 on average for the source's own.

    The squared deviation of each feature is divided by its variance, and averaged over features. Covariances between
    features are left out, so that it costs `n D` whatever family the anchors are of. Inferred anchors have directions
    and no scale, so samples are brought to their length first.
    """

    def __init__(self, stats: SourceStatistics) -> None:
        variance = stats.classes.covariance.diagonal().float()
        self._mean = stats.classes.mean.float()  # [K, D]
        self._variance = variance + RIDGE * float(stats.overall.covariance.diagonal().max())
        self._usual = (variance / self._variance).mean(1).clamp_min(1e-12)  # [K], what the ridge makes of 1
        self._scaled = stats.source_free

    def of(self, outputs: Outputs) -> Tensor:
        """Compute the distance of each sample: `[n]`."""
        labels, features = outputs.labels, outputs.features.float()
        anchors = self._mean[labels]
        if self._scaled:
            features = features * (anchors.norm(dim=1) / features.norm(dim=1).clamp_min(1e-12))[:, None]
        return ((features - anchors).square() / self._variance[labels]).mean(1) / self._usual[labels]

    def by_class(self, outputs: Outputs) -> list[float | None]:
        """Average the distances by predicted class: `[K]`, None where a class has no sample."""
        labels, count = outputs.labels, len(self._mean)
        total = torch.zeros(count, device=labels.device).index_add_(0, labels, self.of(outputs)).tolist()
        seen = torch.bincount(labels, minlength=count).tolist()
        return [far / samples if samples else None for far, samples in zip(total, seen, strict=True)]
