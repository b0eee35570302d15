"""TTAC: anchored clustering and global alignment of features."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ttac.adaptation.alignment import Alignment
from ttac.adaptation.filters import Filtered, FilterKind, filter_pseudo_labels
from ttac.adaptation.losses import filtered_labels
from ttac.data.sets.spec import PaperNumbers
from ttac.data.sets.specs import paper_numbers
from ttac.evaluation.protocols import PROTOCOLS
from ttac.gaussian import Blend, Direction
from ttac.methods.aligned import AlignedAdapter, AlignedOptions
from ttac.methods.base import Capabilities, require
from ttac.methods.registry import register
from ttac.methods.views import View
from ttac.methods.windows import Trial
from ttac.source.statistics import SourceStatistics


@dataclass(frozen=True)
class TTACOptions(AlignedOptions):
    """Numbers of the paper where it has them; the loss weights are free of the network's width, see `Alignment`.

    A weight of 0 switches a loss off, as the ablations do.
    """

    queue: int = 4096
    passes: int = 4
    warmup: bool = False  # one more pass first, forward only, for the batch-norm statistics, which follow without it
    class_start: float = 0.5  # share of the passes before the class loss begins; a single pass has it
    filter: FilterKind = "temporal+posterior"  # of the pseudo labels that move class Gaussians
    xi: float = 0.9
    tau_tc: float = -0.001
    tau_pp: float = 0.9
    cooldown: int = 5  # passes that a temporally inconsistent sample stays out
    clip_global: int = 1280  # N_clip
    clip_class: int = 128  # N_clip_k
    class_weight: float = 5.0
    global_weight: float = 5.0  # lambda_1
    global_distance: Literal["kl", "l2"] = "kl"
    hold_weight: float = 0.25  # of the squared distance to the source's weights, where anchors are inferred
    filtered_weight: float = 0.0  # of cross-entropy with the filtered labels: the ablation's "filter alone"
    inferred_trust: float = 0.2  # share of both weights that inferred anchors get: they are biased, see docs/method.md
    raw_divergence: bool = False  # not divided by the anchors' effective dimension, as the authors' weights expect
    direction: Direction = "symmetric"
    ridge: float = 1 / 30  # added to every covariance's diagonal, as a share of the source's largest variance

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(0 <= self.class_start <= 1, "class_start must be in [0, 1]", self.class_start)
        require(self.cooldown >= 0, "cooldown must not be negative", self.cooldown)
        for name in ("class_weight", "global_weight", "hold_weight", "filtered_weight", "inferred_trust"):
            require(getattr(self, name) >= 0, f"{name} must not be negative", getattr(self, name))
        for name, kinds in (("filter", get_args(FilterKind)), ("global_distance", ("kl", "l2"))):
            require(getattr(self, name) in kinds, f"{name} must be one of {', '.join(kinds)}", getattr(self, name))
        require(0 < self.xi <= 1, "xi must be in (0, 1]", self.xi)
        clips = (self.clip_global, self.clip_class)
        require(min(clips) >= 1, "counts must be clipped at 1 or more", clips)
        require(
            self.direction in ("symmetric", "one-sided"), "direction must be symmetric or one-sided", self.direction
        )
        require(self.ridge > 0, "ridge must be positive", self.ridge)


def _options(numbers: PaperNumbers) -> dict[str, Any]:
    """Say as options what the paper's numbers were made with: one weight, of divergences as they are, always."""
    column = dataclasses.asdict(numbers)
    weight = column.pop("divergence_weight")
    own = {"warmup": True, "raw_divergence": True, "inferred_trust": 1.0, "hold_weight": 0.0}
    return {**own, "class_weight": weight, "global_weight": weight, **column}


PAPER: dict[str, dict[str, Any]] = {name: _options(numbers) for name, numbers in paper_numbers().items()}
# A sixteenth of the paper's steps once the queue is full; docs/speed.md has the errors of both.
FAST: dict[str, dict[str, Any]] = {"fast": {"queue": 4096, "passes": 1, "walk": 1024}}


@register
class TTAC(AlignedAdapter):
    """Draw the target's clusters, found by filtered pseudo labels, to the anchors of the source."""

    capabilities = Capabilities(
        name="ttac",
        title="TTAC",
        protocols=tuple(PROTOCOLS),
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Su et al., Revisiting Realistic Test-Time Training, NeurIPS 2022",
        may_use=("contrastive branch",),
    )
    options_type = TTACOptions
    options: TTACOptions
    presets: ClassVar = FAST | PAPER

    def _make_alignments(self, stats: SourceStatistics) -> dict[str, Alignment]:
        options = self.options
        align = partial(
            Alignment,
            ridge=options.ridge * float(stats.overall.covariance.diagonal().max()),
            means_only=stats.source_free,
            direction=options.direction,
            raw=options.raw_divergence,
        )
        return {
            "anchor": align(stats.classes, clip=options.clip_class),
            "global": align(stats.overall, clip=options.clip_global, distance=options.global_distance),
        }

    def _update(self) -> Tensor | None:
        if self.options.warmup:
            for slots in self.queue.minibatches(self.options.window, self.generator, self.options.walk):
                with torch.no_grad(), self.tracker.following(len(slots)):
                    self.classifier(self.queue.take(slots))
        return super()._update()

    def _try(self, slots: Tensor, number: int) -> Trial:
        options = self.options
        images = self.queue.take(slots)
        weak = self._weak(images)
        filtered = filter_pseudo_labels(
            weak.posterior, self.queue.memory.rows(slots), kind=options.filter,
            xi=options.xi, tau_tc=options.tau_tc, tau_pp=options.tau_pp, cooldown=options.cooldown,
        )  # fmt: skip
        losses: dict[str, Tensor] = {}
        blends: dict[str, Blend] = {}
        late = number >= options.class_start * options.passes or options.passes == 1
        inferred = self.stats is not None and self.stats.source_free
        trust = options.inferred_trust if inferred else 1.0
        for name, weight, assignment in (
            ("anchor", trust * options.class_weight if late else 0, self._assignment(weak, filtered)),
            ("global", trust * options.global_weight, None),
        ):
            pull, blends[name] = self._align(name, weight, weak.features, assignment)
            losses |= pull
        if options.filtered_weight:
            losses["filtered"] = options.filtered_weight * filtered_labels(weak.logits, filtered.assignment)
        if inferred and options.hold_weight:
            losses["hold"] = options.hold_weight * self._distance_to_source()
        losses |= self._further_losses(images, weak)

        def keep() -> None:
            self._commit(blends)
            self.queue.remember(slots, filtered.memory)

        return Trial(losses, weak.logits, keep, self._later_losses(images, weak))

    def _distance_to_source(self) -> Tensor:
        """Compute half the squared distance of the weights to the source's, the anchor that is left without data."""
        steps = [(value - self._source[name]).float() for name, value in self._learning.items()]
        return 0.5 * torch.stack([step.square().sum() for step in steps]).sum()

    def _assignment(self, weak: View, filtered: Filtered) -> Tensor:
        return self.alignments["anchor"].share(weak.features) if self.options.filter == "soft" else filtered.assignment

    def _begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        """Remember posteriors over the passes, or temporal consistency would have nothing to compare with."""
        self.queue.begin_epoch()

    def _further_losses(self, images: Tensor, weak: View) -> dict[str, Tensor]:
        """Add weighted losses of a method that builds on this one."""
        return self._contrast(weak, self._strong(images)) if self.options.contrastive_weight else {}

    def _later_losses(self, images: Tensor, weak: View) -> Callable[[], dict[str, Tensor]] | None:
        """Add weighted losses that share no graph with the weak views, computed when those have been differentiated."""
        return None
