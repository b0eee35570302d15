"""TTAC: anchored clustering and global alignment of features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.alignment import Alignment, Distance
from ttac.adaptation.depths import DepthAlignment
from ttac.adaptation.filters import Filtered, FilterKind, Remembered, filter_pseudo_labels
from ttac.adaptation.losses import diversity, entropy, filtered_labels
from ttac.adaptation.method import EVERY_PROTOCOL, Batch, Capabilities, Method, View, backbone
from ttac.adaptation.normalisation import FollowingNorms
from ttac.adaptation.options import BranchOptions
from ttac.adaptation.shift import SourceShift, stored_gaussians
from ttac.adaptation.step import Loss
from ttac.common.options import setting
from ttac.gaussian import RIDGE, Direction, Gaussians
from ttac.methods.registry import register
from ttac.model.branches import ContrastiveBranch
from ttac.model.depths import recorded
from ttac.model.norms import entering
from ttac.source.depths import USUAL_CLIPS


@dataclass(frozen=True)
class TTACOptions(BranchOptions):
    """Numbers of the paper where it has them; the loss weights are free of the network's width, see `Alignment`.

    A weight of 0 switches a loss off, as the ablations do.
    """

    queue: int = setting(4096, "N_C, samples that an update walks over; 0: the window alone", least=0)
    passes: int = setting(4, "N_itr over the queue an update", least=1)
    samples_a_pass: int = setting(0, "in the queue, for each pass after the first; 0: all passes at once", least=0)
    warmup: bool = setting(False, "one more pass first, forward only, for the batch-norm statistics")
    class_start: float = setting(0.5, "share of several passes before the class loss begins", least=0, most=1)
    filter: FilterKind = setting("none", "of the pseudo labels that move class Gaussians")
    xi: float = setting(0.9, "share of the newest posterior in a sample's moving average", above=0, most=1)
    tau_tc: float = setting(-0.001, "change of a posterior from which it is temporally consistent")
    tau_pp: float = setting(0.9, "averaged posterior from which a pseudo label counts")
    cooldown: int = setting(5, "passes that a temporally inconsistent sample stays out", least=0)
    filter_stored: bool = setting(False, "filters see posteriors by the stored batch-norm statistics, one more pass")
    clip_global: int = setting(
        USUAL_CLIPS["overall"], "N_clip, samples that the past of the global Gaussian counts as", least=1
    )
    clip_class: int = setting(
        USUAL_CLIPS["classes"], "N_clip_k, samples that the past of a class Gaussian counts as", least=1
    )
    class_weight: float = setting(20.0, "of the divergence of class Gaussians", least=0)
    global_weight: float = setting(20.0, "lambda_1, of the divergence of the global Gaussian", least=0)
    global_distance: Distance = setting("kl", "between global Gaussians")
    hold_weight: float = setting(0.25, "of the distance to the source's weights, for inferred anchors", least=0)
    filtered_weight: float = setting(0.0, "of cross-entropy with filtered labels, an ablation", least=0)
    inferred_trust: float = setting(0.003, "share of both weights that inferred anchors get", least=0)
    raw_divergence: bool = setting(False, "not divided by the effective dimension, as the authors do")
    direction: Direction = setting("symmetric", "of the divergence")
    depth_weight: float = setting(0.0, "of the divergence at every depth", least=0)
    information_weight: float = setting(0.0, "of entropy and diversity, SHOT's information maximisation", least=0)
    bn_momentum: float | None = setting(None, "of the stored batch-norm statistics; None: by counts", above=0, most=1)
    empty_start: bool = setting(False, "running Gaussians start empty, as the authors'; else at the anchors")
    floor: bool = setting(True, "what cannot be told from the source does not pull")
    ridge: float = setting(RIDGE, "on every covariance, as a share of the source's largest variance", above=0)


def _paper(
    window: int, lr: float, tau_tc: float, clip_global: int, clip_class: int, weight: float = 0.05, passes: int = 4
) -> dict[str, Any]:
    """Say as options what a column of the paper's table was made with: the authors' code to the letter.

    What they settle is said here even where it is the default, which may become another one.
    """
    return {
        "window": window, "queue": 4096, "walk": 0, "passes": passes, "samples_a_pass": 256, "warmup": True,
        "class_start": 0.5, "predict": "after", "lr": lr, "momentum": 0.9, "trust": 0.0, "bn_momentum": 0.1,
        "flip": True, "crop": False, "filter": "temporal+posterior", "filter_stored": True, "xi": 0.9,
        "tau_tc": tau_tc, "tau_pp": 0.9, "cooldown": 4,  # five passes with the one that rejects
        "clip_global": clip_global, "clip_class": clip_class, "empty_start": True, "floor": False,
        "direction": "symmetric", "global_distance": "kl", "raw_divergence": True, "ridge": 1 / 30,
        "class_weight": weight, "global_weight": weight, "inferred_trust": 1.0, "hold_weight": 0.0,
        "filtered_weight": 0.0, "depth_weight": 0.0, "information_weight": 0.0,
    }  # fmt: skip


PAPER: dict[str, dict[str, Any]] = {
    "paper": _paper(256, 0.01, -0.001, 1280, 128),
    "paper-cifar100": _paper(256, 1e-4, -0.001, 1280, 64, weight=0.5),
    "paper-imagenet": _paper(128, 7e-5, -0.01, 1280, 64, passes=2),
    "paper-visda": _paper(128, 1e-4, -0.01, 1536, 128),
}
# A sixteenth of the paper's steps once the queue is full (docs/speed.md).
FAST: dict[str, dict[str, Any]] = {"fast": {"queue": 4096, "passes": 1, "walk": 1024}}


@register
class TTAC(Method):
    """Draw the target's clusters, found by filtered pseudo labels, to the anchors of the source."""

    capabilities = Capabilities(
        "ttac",
        "TTAC",
        EVERY_PROTOCOL,
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Su et al., Revisiting Realistic Test-Time Training, NeurIPS 2022",
        may_use=("contrastive branch",),
    )
    options_type = TTACOptions
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = FAST | PAPER
    checked_with: ClassVar[Mapping[str, Any]] = {"tau_pp": 0.0}
    alignments: dict[str, Alignment]

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        assert adapter.stats is not None
        self.inferred = adapter.stats.source_free
        self.depths = DepthAlignment(
            self._depth_anchors() if adapter.options.depth_weight else {},
            adapter.stats.floors if adapter.options.floor else {},
            adapter.options.window,
            adapter.reduction,
        )
        if adapter.options.depth_weight and not adapter.stats.depths and not self.inferred:
            raise ValueError(
                "depth_weight aligns the outputs of blocks, and these statistics have none: collect them again with "
                "SourceStatistics.collect, or set depth_weight=0"
            )
        self.declare(alignments=self._make_alignments)
        # Inferred statistics have no floors of their own.
        shift = SourceShift(self.classifier, adapter.source, adapter.reduction)
        self.shift = shift if self.inferred and adapter.options.floor and shift.known else None
        self.teaches = 1.0  # the weight of the running update

    @classmethod
    def uses(cls, options: TTACOptions) -> tuple[str, ...]:
        return uses_branch(cls.capabilities, options)

    def _depth_anchors(self) -> Mapping[str, Gaussians]:
        """Give what is known of the source at every depth: without its data, what enters the batch-norm layers."""
        assert self.adapter.stats is not None
        if not self.inferred:
            return self.adapter.stats.depths
        stored = stored_gaussians(self.classifier, self.adapter.source)
        return {
            name: one for name, one in stored.items() if isinstance(self.classifier.get_submodule(name), nn.BatchNorm2d)
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        return backbone(self.classifier)

    def columns(self) -> dict[str, Tensor]:
        return {name: rows[0] for name, rows in vars(Remembered.blank(1, self.classifier.num_classes)).items()}

    def _make_alignments(self) -> dict[str, Alignment]:
        options, stats = self.adapter.options, self.adapter.stats
        assert stats is not None
        align = partial(
            Alignment,
            ridge=options.ridge * float(stats.overall.covariance.diagonal().max()),
            means_only=stats.source_free,
            direction=options.direction,
            raw=options.raw_divergence,
            empty=options.empty_start,
            reduction=self.adapter.reduction,
        )
        floors = stats.floors if options.floor else {}
        # Measured for estimates of the usual lengths; noise falls with the number of samples.
        floor_class = floors.get("classes", 0.0) * USUAL_CLIPS["classes"] / options.clip_class
        floor_global = floors.get("overall", 0.0) * USUAL_CLIPS["overall"] / options.clip_global
        return {
            "anchor": align(stats.classes, clip=options.clip_class, floor=floor_class),
            "global": align(
                stats.overall, clip=options.clip_global, distance=options.global_distance, floor=floor_global
            ),
        }

    def before_update(self) -> None:
        """Walk the queue once without learning, where the option asks for it, as the authors' code does."""
        options, adapter = self.adapter.options, self.adapter
        for alignment in self.alignments.values():
            alignment.look()
        if self.shift is not None:
            window = Batch(adapter, adapter.memory_in_use.newest(options.window), 0)
            with self.shift.measured():
                window.apart(window.images)
            self.teaches = self.shift.weight()
        if options.warmup:
            for slots in adapter.memory_in_use.minibatches(options.window, adapter.generator, options.walk):
                with adapter.norms.kept_if_finite(adapter.norms.snapshot()), torch.no_grad():
                    self.look(Batch(adapter, slots, 0))

    def rate(self) -> float:
        """Take smaller steps on a window that can hardly be told from the source."""
        return self.teaches * super().rate()

    def passes(self) -> int:
        options, length = self.adapter.options, len(self.adapter.memory_in_use)
        allowed = length // options.samples_a_pass + 1 if options.samples_a_pass else options.passes
        return min(options.passes, allowed)

    def norms(self) -> FollowingNorms:
        options, reduction = self.adapter.options, self.adapter.reduction
        return FollowingNorms(self.classifier, clip=options.bn_clip, momentum=options.bn_momentum, reduction=reduction)

    def look(self, batch: Batch) -> tuple[View, View | None]:
        """Run the weak views, and the strong ones where they share a batch with them."""
        return batch.weak(), None

    def losses(self, batch: Batch) -> dict[str, Loss]:
        options = self.adapter.options
        if not self.teaches:
            batch.forward()
            return {}
        watched = entering if self.inferred else recorded
        with watched(self.classifier, tuple(self.depths.anchors)) as outputs:
            weak, strong = self.look(batch)
        filtered = self._filter(batch, weak)
        late = batch.number >= options.class_start * options.passes or options.passes == 1
        trust = options.inferred_trust if self.inferred else 1.0
        anchor, overall = self.alignments["anchor"], self.alignments["global"]
        soft = options.filter == "soft"
        assignment = anchor.share(weak.features) if soft else filtered.assignment
        losses = {
            **anchor.losses("anchor", trust * options.class_weight if late else 0.0, weak.features, batch, assignment),
            **overall.losses("global", trust * options.global_weight, weak.features, batch),
        }
        if self.depths.anchors:
            losses["depths"] = self.depths.pull(outputs, len(batch), options.depth_weight)
        if options.information_weight:
            losses["entropy"] = options.information_weight * entropy(weak.logits)
            losses["diversity"] = -options.information_weight * diversity(weak.logits)
        if options.filtered_weight:
            losses["filtered"] = options.filtered_weight * filtered_labels(weak.logits, filtered.assignment)
        if self.inferred and options.hold_weight:
            losses["hold"] = options.hold_weight * self._distance_to_source()
        return {**losses, **self.further_losses(batch, weak, strong)}

    def _filter(self, batch: Batch, weak: View) -> Filtered:
        options, memory = self.adapter.options, self.adapter.memory_in_use
        posterior = batch.posterior_by_stored() if options.filter_stored else weak.posterior
        filtered = filter_pseudo_labels(
            posterior, Remembered(**memory.recall(batch.slots)), kind=options.filter,
            xi=options.xi, tau_tc=options.tau_tc, tau_pp=options.tau_pp, cooldown=options.cooldown,
        )  # fmt: skip
        batch.when_taken(lambda: memory.remember(batch.slots, vars(filtered.memory)))
        return filtered

    def _distance_to_source(self) -> Tensor:
        """Compute half the squared distance of the weights to the source's, the anchor that is left without data."""
        steps = [(value - self.adapter.source[name]).float() for name, value in self.adapter.parameters.items()]
        return 0.5 * torch.stack([step.square().sum() for step in steps]).sum()

    def begin_epoch(self, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        """Remember posteriors over the passes, or temporal consistency would have nothing to compare with."""
        self.adapter.memory_in_use.begin_epoch()

    def measures(self) -> dict[str, Tensor | float]:
        """Tell how far the target is from the source, in units of how far the source is from itself."""
        noise = self.depths.noise() if self.shift is None else self.shift.distance
        return {} if noise is None else {"distance to the source": noise}

    def further_losses(self, batch: Batch, weak: View, strong: View | None) -> dict[str, Loss]:
        """Add the losses of a method that builds on this one."""
        return contrast(self, weak, strong or batch.strong()) if self.adapter.options.contrastive_weight else {}


def uses_branch(capabilities: Capabilities, options: BranchOptions) -> tuple[str, ...]:
    """Name what a method uses that learns with the contrastive branch where that has a weight."""
    return (*capabilities.needs, *(capabilities.may_use if options.contrastive_weight else ()))


def contrast(method: Method, weak: View, strong: View) -> dict[str, Loss]:
    """Give the weighted loss of the contrastive branch on two views."""
    branch = method.classifier.branch
    assert isinstance(branch, ContrastiveBranch)
    loss = branch.loss(branch(weak.features), branch(strong.features))
    return {"contrastive": method.adapter.options.contrastive_weight * loss}
