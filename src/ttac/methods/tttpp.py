"""TTT++: moments of features matched with the source's, and a contrastive branch that goes on learning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ttac.adaptation.alignment import Alignment
from ttac.methods.aligned import AlignedAdapter, AlignedOptions
from ttac.methods.base import Capabilities, require
from ttac.methods.registry import register
from ttac.methods.windows import Trial
from ttac.model.branches import ContrastiveBranch
from ttac.source.statistics import SourceStatistics


@dataclass(frozen=True)
class TTTPlusPlusOptions(AlignedOptions):
    """Published numbers where they keep their meaning: the queue of 1536 features and the contrastive weight of 1.

    Distances are divided by the source's own moments, the published ones by what they are between the source and a
    batch of it. For covariances of ten effective dimensions the published 0.05 then is a weight of about 7.
    """

    clip: int = 1536  # features that the target's moments are estimated from
    feature_weight: float = 5.0
    projection_weight: float = 5.0  # of the moments in the branch's space, where it is used

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(self.clip >= 1, "clip must be at least 1", self.clip)
        for name in ("feature_weight", "projection_weight"):
            require(getattr(self, name) >= 0, f"{name} must not be negative", getattr(self, name))


@register
class TTTPlusPlus(AlignedAdapter):
    """Match mean and covariance of the target's features, and of its projections, with those of the source."""

    capabilities = Capabilities(
        name="ttt++",
        title="TTT++",
        protocols=("N-O-SL", "Y-O-SL", "N-M-SL", "Y-M-SL"),
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Liu et al., TTT++: When Does Self-Supervised Test-Time Training Fail or Thrive?, NeurIPS 2021",
        may_use=("contrastive branch",),
    )
    options_type = TTTPlusPlusOptions
    options: TTTPlusPlusOptions

    def _make_alignments(self, stats: SourceStatistics) -> dict[str, Alignment]:
        options = self.options
        # The published queue of features starts empty; running moments of the same length that start at the source's
        # need no features of an older network, and no minibatch is too small for them. An L2 distance takes no ridge.
        align = partial(Alignment, ridge=0.0, clip=options.clip, distance="l2")
        alignments = {"features": align(stats.overall, means_only=stats.source_free)}
        if self.branch_used and options.projection_weight:
            if stats.projected is None:
                raise ValueError(
                    f"{self.capabilities.title} matches moments in the space of the contrastive branch, and these "
                    "statistics have none: collect them again with SourceStatistics.collect and the model with its "
                    "branch, or set projection_weight=0"
                )
            alignments["projections"] = align(stats.projected, means_only=False)
        return alignments

    def _try(self, slots: Tensor, number: int) -> Trial:
        options = self.options
        images = self.queue.take(slots)
        weak = self._weak(images)
        vectors = {"features": weak.features}
        weights = {"features": options.feature_weight, "projections": options.projection_weight}
        losses: dict[str, Tensor] = {}
        branch = self.classifier.branch
        if isinstance(branch, ContrastiveBranch):
            vectors["projections"] = branch(weak.features)
            # Two strong views in the publication; the weak one stands for one of them here, as in source training.
            losses |= self._contrast(weak, self._strong(images))
        blends = {}
        for name in self.alignments:
            pull, blends[name] = self._align(name, weights[name], vectors[name])
            losses |= pull
        return Trial(losses, weak.logits, lambda: self._commit(blends))
