"""What source training minimises: a loss of the labels, and for some a loss of an auxiliary branch beside it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.common.lookup import pick
from ttac.common.options import Checked, checked_fields, read_value, setting
from ttac.model.branches import BRANCHES, Branch, BranchKind, ContrastiveBranch, rotate
from ttac.model.classifier import Classifier
from ttac.model.norms import batch_norms, own_statistics
from ttac.model.views import LARGEST_MAGNITUDE, strong_view
from ttac.source.knowledge import TrainingLoss

LARGEST = 1e6  # of a weight; JSON has numbers that no float can hold


@dataclass(frozen=True)
class SourceBatch:
    """Images as they are and as a view to learn the labels from `[N, C, H, W]`, and their labels `[N]`."""

    images: Tensor
    weak: Tensor  # a share of them under strong operations, if the recipe says so
    labels: Tensor
    flip: bool  # whether a mirrored image is still of its class


@dataclass(frozen=True)
class Objective(Checked, ABC):
    """A named objective; its fields are its parameters."""

    name: ClassVar[str]
    branch: ClassVar[BranchKind | None] = None

    @abstractmethod
    def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
        """Compute the terms to be summed, weighted already; `classifier.branch` is of the kind `branch`."""

    def new_branch(self, feature_dim: int) -> Branch | None:
        """Make the untrained branch, None where there is none."""
        return None if self.branch is None else BRANCHES[self.branch](feature_dim)

    def training_loss(self) -> TrainingLoss:
        """Say which loss the labels had.

        >>> Poly(epsilon=2.0).training_loss().provenance(), CrossEntropyRotation().training_loss().provenance()
        ({'name': 'poly', 'epsilon': 2.0}, {'name': 'ce'})
        """
        return TrainingLoss("ce")

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

    # At -1 the first power of 1 - p has no weight left.
    epsilon: float = setting(1.0, "added to the coefficient 1 of the first power of 1 - p", least=-1, most=LARGEST)

    def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
        return {"poly": poly_loss(classifier(batch.weak), batch.labels, self.epsilon)}

    def training_loss(self) -> TrainingLoss:
        return TrainingLoss("poly", {"epsilon": float(self.epsilon)})


@dataclass(frozen=True)
class CrossEntropyContrastive(Objective):
    """Cross-entropy of the weak view, and a contrast of it with a strong view in the branch's space (TTT++)."""

    name = "ce+contrastive"
    branch = "contrastive"

    branch_weight: float = setting(0.3, "of the branch's loss", least=0, most=LARGEST)
    operations: int = setting(2, "of the strong view", least=0)
    magnitude: int = setting(10, "of the strong view's operations", least=0, most=LARGEST_MAGNITUDE)

    def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
        branch = classifier.branch
        assert isinstance(branch, ContrastiveBranch)
        features, logits = classifier.features_and_logits(batch.weak)
        strong = strong_view(
            batch.images,
            generator,
            flip=batch.flip,
            kind="own-range",
            operations=self.operations,
            magnitude=self.magnitude,
        )
        with own_statistics(batch_norms(classifier)):
            strong_features = classifier.features(strong)
        contrast = branch.loss(branch(features), branch(strong_features))
        return {"ce": F.cross_entropy(logits, batch.labels), "contrastive": self.branch_weight * contrast}


@dataclass(frozen=True)
class CrossEntropyRotation(Objective):
    """Cross-entropy of the weak view, and of the branch telling how it was turned (TTT)."""

    name = "ce+rotation"
    branch = "rotation"

    branch_weight: float = setting(0.5, "of the branch's loss", least=0, most=LARGEST)

    def losses(self, classifier: Classifier, batch: SourceBatch, generator: torch.Generator) -> dict[str, Tensor]:
        assert classifier.branch is not None
        turns = torch.randint(4, (len(batch.weak),), generator=generator).to(batch.weak.device)
        ce = F.cross_entropy(classifier(batch.weak), batch.labels)
        with own_statistics(batch_norms(classifier)):
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
    kind = pick(name, OBJECTIVES, "objective")
    known = {field.name: hint for field, hint in checked_fields(kind)}
    of = f"parameter of the objective {name}"
    return kind(**{key: read_value(value, pick(key, known, of)) for key, value in parameters.items()})


def poly_loss(logits: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    """Compute the mean of `-log p + epsilon (1 - p)` with p of the label: `[N, K]`, `[N] -> []`.

    >>> poly_loss(torch.zeros(1, 2), torch.tensor([0]), epsilon=2.0)  # log 2 + 1
    tensor(1.6931)
    """
    entropy = F.cross_entropy(logits.float(), labels, reduction="none")
    return (entropy + epsilon * (1 - (-entropy).exp())).mean()
