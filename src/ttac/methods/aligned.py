"""What methods share that align features with the source's and may use its contrastive branch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttac.adaptation.alignment import Alignment
from ttac.gaussian import Blend
from ttac.methods.base import require
from ttac.methods.views import View, ViewAdapter, ViewOptions
from ttac.model.branches import BranchKind, ContrastiveBranch
from ttac.source.statistics import SourceStatistics


@dataclass(frozen=True)
class AlignedOptions(ViewOptions):
    """What can be set for methods that align features."""

    contrastive_weight: float = 0.0  # of the branch that the Y protocols train; 0: it is not used

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.contrastive_weight >= 0, "contrastive_weight must not be negative", self.contrastive_weight)


class AlignedAdapter(ViewAdapter):
    """An adapter with named alignments, whose running Gaussians are part of its state."""

    options: AlignedOptions

    @abstractmethod
    def _make_alignments(self, stats: SourceStatistics) -> dict[str, Alignment]:
        """Make the alignments with the statistics of the source, by name."""

    @property
    def branch_used(self) -> BranchKind | None:
        """The contrastive branch, where its loss has a weight."""
        return "contrastive" if self.options.contrastive_weight else None

    def _begin(self) -> None:
        super()._begin()
        assert self.stats is not None
        self.alignments = self._make_alignments(self.stats)

    def _align(
        self, name: str, weight: float, vectors: Tensor, assignment: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Blend]:
        """Give one alignment's pull on `vectors [n, D]`, in any precision, weighted and by name, and their blend.

        All are assigned to its only Gaussian unless said otherwise. Without a weight there is no pull.
        """
        alignment = self.alignments[name]
        if assignment is None:
            assignment = torch.zeros(len(vectors), dtype=torch.int64, device=vectors.device)
        if not weight:
            return {}, alignment.running.blend(vectors, assignment)
        pull, blend = alignment.pull(vectors, assignment)
        return {name: weight * pull}, blend

    def _commit(self, blends: Mapping[str, Blend]) -> None:
        for name, blend in blends.items():
            self.alignments[name].running.commit(blend)

    def _contrast(self, weak: View, strong: View) -> dict[str, Tensor]:
        """Give the branch's weighted loss, none where it is not used."""
        branch = self.classifier.branch
        if not isinstance(branch, ContrastiveBranch):
            return {}
        loss = branch.loss(branch(weak.features), branch(strong.features))
        return {"contrastive": self.options.contrastive_weight * loss}

    def _state(self) -> dict[str, Any]:
        alignments = {name: alignment.running.state() for name, alignment in self.alignments.items()}
        return {**super()._state(), "alignments": alignments}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        for name, alignment in self.alignments.items():
            alignment.running.load(state["alignments"][name])
