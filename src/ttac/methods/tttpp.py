"""TTT++: moments of features matched with the source's, and a contrastive branch that goes on learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.alignment import Alignment
from ttac.adaptation.method import Batch, Capabilities, Method, backbone
from ttac.adaptation.options import BranchOptions
from ttac.adaptation.step import Loss
from ttac.common.options import setting
from ttac.methods.registry import register
from ttac.methods.ttac import contrast, uses_branch


@dataclass(frozen=True)
class TTTPlusPlusOptions(BranchOptions):
    """The published numbers for CIFAR-10: SGD at 0.01, 0.05 for features, 0.2 for projections, 1536 features.

    The published loss is `w (coral / coral_s + mmd / (2 mmd_s))`: `coral` is the squared distance of covariances, `mmd`
    of means, and `coral_s` and `mmd_s` are what they are on average between two batches of the source as long as the
    queue. Here the two averages are those of Gaussians, which the statistics are enough for (`moment_distance`); the
    published code measures them, and constant factors as `1 / 4 d^2` cancel. The contrastive weight is 1 there, and 0
    here unless a Y protocol is asked for.
    """

    lr: float | None = setting(0.01, "rate of every step", above=0)
    momentum: float = setting(0.9, "of SGD", least=0, below=1)
    trust: float = setting(0.0, "share of the weights' norm that a step moves them by at most; 0: any", least=0)
    clip: int = setting(1536, "features that the target's moments are estimated from", least=1)
    feature_weight: float = setting(0.05, "of the moments of features, in distances of source batches", least=0)
    projection_weight: float = setting(0.2, "of the moments in the branch's space, where it is used", least=0)


@register
class TTTPlusPlus(Method):
    """Match mean and covariance of the target's features, and of its projections, with those of the source."""

    capabilities = Capabilities(
        "ttt++",
        "TTT++",
        ("N-O-SL", "Y-O-SL", "N-M-SL", "Y-M-SL"),
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Liu et al., TTT++: When Does Self-Supervised Test-Time Training Fail or Thrive?, NeurIPS 2021",
        may_use=("contrastive branch",),
    )
    options_type = TTTPlusPlusOptions
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper-cifar100": {"lr": 0.0001, "clip": 2048, "feature_weight": 5.0, "projection_weight": 20.0},
    }
    alignments: dict[str, Alignment]

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.declare(alignments=self._make_alignments)

    @classmethod
    def uses(cls, options: TTTPlusPlusOptions) -> tuple[str, ...]:
        return uses_branch(cls.capabilities, options)

    def parameters(self) -> dict[str, nn.Parameter]:
        return backbone(self.classifier)

    def _make_alignments(self) -> dict[str, Alignment]:
        options, stats = self.adapter.options, self.adapter.stats
        assert stats is not None
        # The published queue of features starts empty; running moments of the same length that start at the source's
        # need no features of an older network, and no minibatch is too small for them. An L2 distance takes no ridge.
        align = partial(Alignment, ridge=0.0, clip=options.clip, distance="l2", reduction=self.adapter.reduction)
        alignments = {"features": align(stats.overall, means_only=stats.source_free)}
        if options.contrastive_weight and options.projection_weight:
            if stats.projected is None:
                raise ValueError(
                    f"{self.capabilities.title} matches moments in the space of the contrastive branch, and these "
                    "statistics have none: collect them again with SourceStatistics.collect and the model with its "
                    "branch, or set projection_weight=0"
                )
            alignments["projections"] = align(stats.projected, means_only=False)
        return alignments

    def losses(self, batch: Batch) -> dict[str, Loss]:
        options = self.adapter.options
        weak = batch.weak()
        scale = options.clip / 4  # the batches that published weights refer to are as long as the queue
        weights = {"features": scale * options.feature_weight, "projections": scale * options.projection_weight}
        vectors: dict[str, Tensor] = {"features": weak.features}
        losses: dict[str, Loss] = {}
        if options.contrastive_weight:
            assert self.classifier.branch is not None
            vectors["projections"] = self.classifier.branch(weak.features)
            # Two strong views in the publication; the weak one stands for one of them here, as in source training.
            losses |= contrast(self, weak, batch.strong())
        for name, alignment in self.alignments.items():
            losses |= alignment.losses(name, weights[name], vectors[name], batch)
        return losses
