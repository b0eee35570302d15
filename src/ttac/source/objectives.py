"""What source training minimises: a loss of the labels, and for some a loss of an auxiliary branch beside it."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.model.branches import BRANCHES, Branch, BranchKind, ContrastiveBranch, rotate
from ttac.model.classifier import Classifier
from ttac.model.norms import BatchNormTracker
from ttac.model.views import LARGEST_MAGNITUDE, strong_view


@dataclass(frozen=True)
class SourceBatch:
    """Images as they are and as a weak view `[N, C, H, W]`, and their labels `[N]`."""

    images: Tensor
    weak: Tensor
    labels: Tensor
    flip: bool  # whether a mirrored image is still of its class


@dataclass(frozen=True)
class Objective(ABC):
    """A named objective; its fields are its parameters."""

    name: ClassVar[str]
    branch: ClassVar[BranchKind | None] = None

    @abstractmethod
    def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
        """Compute the terms to be summed, weighted already; `classifier.branch` is of the kind `branch`."""

    def new_branch(self, feature_dim: int) -> Branch | None:
        """Make the untrained branch, None where there is none."""
        return None if self.branch is None else BRANCHES[self.branch](feature_dim)

    def source_loss(self) -> dict[str, Any]:
        """Say which loss the labels had, by the names of the options of methods that go by it.

        >>> Poly(epsilon=2.0).source_loss(), CrossEntropyRotation().source_loss()
        ({'source_loss': 'poly', 'epsilon': 2.0}, {'source_loss': 'ce'})
        """
        return {"source_loss": "ce"}

    def as_dict(self) -> dict[str, Any]:
        """Give the name and the parameters as plain values.

        >>> Poly().as_dict()
        {'name': 'poly', 'epsilon': 1.0}
        """
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """Cross-entropy of the weak view."""

    name = "ce"

    def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
        return {"ce": F.cross_entropy(classifier(batch.weak), batch.labels)}


@dataclass(frozen=True)
class Poly(Objective):
    """PolyLoss with one changed coefficient, Poly-1, of the weak view (Leng et al., ICLR 2022)."""

    name = "poly"

    epsilon: float = 1.0  # added to the coefficient 1 of the first power of 1 - p

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if not (math.isfinite(self.epsilon) and self.epsilon >= -1):
            raise ValueError(f"epsilon must be at least -1, where 1 - p has no weight left, not {self.epsilon}")

    def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
        return {"poly": poly_loss(classifier(batch.weak), batch.labels, self.epsilon)}

    def source_loss(self) -> dict[str, Any]:
        return {"source_loss": "poly", "epsilon": self.epsilon}


@dataclass(frozen=True)
class CrossEntropyContrastive(Objective):
    """Cross-entropy of the weak view, and a contrast of it with a strong view in the branch's space (TTT++)."""

    name = "ce+contrastive"
    branch = "contrastive"

    branch_weight: float = 0.3
    operations: int = 2  # of the strong view
    magnitude: int = 10

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        _check_weight(self.branch_weight)
        if self.operations < 0 or not 0 <= self.magnitude <= LARGEST_MAGNITUDE:
            raise ValueError(
                f"operations must be at least 0 and magnitude in 0..{LARGEST_MAGNITUDE}, "
                f"not {self.operations} and {self.magnitude}"
            )

    def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
        branch = classifier.branch
        assert isinstance(branch, ContrastiveBranch)
        features, logits = classifier.features_and_logits(batch.weak)
        strong = strong_view(
            batch.images, generator, flip=batch.flip, operations=self.operations, magnitude=self.magnitude
        )
        with normalised_apart(classifier):
            strong_features = classifier.features(strong)
        contrast = branch.loss(branch(features), branch(strong_features))
        return {"ce": F.cross_entropy(logits, batch.labels), "contrastive": self.branch_weight * contrast}


@dataclass(frozen=True)
class CrossEntropyRotation(Objective):
    """Cross-entropy of the weak view, and of the branch telling how it was turned (TTT)."""

    name = "ce+rotation"
    branch = "rotation"

    branch_weight: float = 0.5

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        _check_weight(self.branch_weight)

    def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
        assert classifier.branch is not None
        turns = torch.randint(4, (len(batch.weak),), generator=generator).to(batch.weak.device)
        ce = F.cross_entropy(classifier(batch.weak), batch.labels)
        with normalised_apart(classifier):
            scores = classifier.branch(classifier.features(rotate(batch.weak, turns)))
        return {"ce": ce, "rotation": self.branch_weight * F.cross_entropy(scores, turns)}


OBJECTIVES: Mapping[str, type[Objective]] = {
    objective.name: objective for objective in (CrossEntropy, CrossEntropyContrastive, CrossEntropyRotation, Poly)
}


def make_objective(name: str, **parameters: float) -> Objective:
    """Make an objective by name, or raise a ValueError that says what there is.

    >>> make_objective("poly", epsilon=2.0)
    Poly(epsilon=2.0)
    """
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
    known = dataclasses.asdict(OBJECTIVES[name]())
    typed: dict[str, float] = {}
    for key, value in parameters.items():
        if key not in known:
            raise ValueError(f"the objective {name} has no parameter {key!r}; it has: {', '.join(known) or 'none'}")
        wanted: type[float] = type(known[key])
        if isinstance(value, bool) or not isinstance(value, int | wanted):
            raise ValueError(f"{key} of the objective {name} must be {wanted.__name__}, not {value!r}")
        try:
            typed[key] = wanted(value)
        except OverflowError as error:  # JSON has integers that no float can hold
            raise ValueError(f"{key} of the objective {name} is too large a number") from error
    return OBJECTIVES[name](**typed)


def poly_loss(logits: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    """Compute the mean of `-log p + epsilon (1 - p)` with p of the label: `[N, K]`, `[N] -> []`.

    >>> poly_loss(torch.zeros(1, 2), torch.tensor([0]), epsilon=2.0)  # log 2 + 1
    tensor(1.6931)
    """
    entropy = F.cross_entropy(logits.float(), labels, reduction="none")
    return (entropy + epsilon * (1 - (-entropy).exp())).mean()


@contextmanager
def normalised_apart(classifier: Classifier) -> Iterator[None]:
    """Let batch norms use a view's own statistics without storing them: at test time no such view is predicted."""
    tracker = BatchNormTracker(classifier, clip=1)
    modes = [layer.training for layer in tracker.layers]
    try:
        with tracker.apart():
            yield
    finally:
        for layer, mode in zip(tracker.layers, modes, strict=True):
            layer.training = mode


def _check_weight(weight: float) -> None:
    if not 0 <= weight < math.inf:
        raise ValueError(f"branch_weight must be at least 0, not {weight}")
