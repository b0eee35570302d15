"""TTAC: anchored clustering and global alignment of features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ttac.data.views import weak_view
from ttac.filters import filter_pseudo_labels
from ttac.gaussian import Blend, Direction, Gaussians, RunningGaussians, choose_family, divergence
from ttac.methods.base import Capabilities, WindowAdapter, WindowOptions, require
from ttac.methods.registry import register
from ttac.norms import BatchNormTracker
from ttac.sample_queue import SampleQueue
from ttac.update import Updater


@dataclass(frozen=True)
class TTACOptions(WindowOptions):
    """Numbers of the paper where it has them; the loss weights are free of the network's width, see `Alignment`."""

    queue: int = 4096  # N_C; 0: the window alone
    passes: int = 4  # N_itr over the queue an update
    warmup: bool = True  # one more pass first, forward only, for the batch-norm statistics
    class_start: float = 0.5  # share of the passes before the class loss begins; a single pass has it
    lr: float | None = None  # of every step; None: `rate_budget` shared out among the steps, see `_rate`
    rate_budget: float = 0.02  # learning rate that 256 samples may spend, however many steps and windows they make
    momentum: float = 0.9
    xi: float = 0.9
    tau_tc: float = -0.001
    tau_pp: float = 0.9
    cooldown: int = 5  # passes that a temporally inconsistent sample stays out
    clip_global: int = 1280  # N_clip
    clip_class: int = 128  # N_clip_k
    class_weight: float = 5.0
    global_weight: float = 5.0  # lambda_1
    raw_divergence: bool = False  # not divided by the anchors' effective dimension, as the authors' weights expect
    direction: Direction = "symmetric"
    ridge: float = 1 / 30  # added to every covariance's diagonal, as a share of the source's largest variance
    flip: bool = True  # whether a mirrored image is still of its class
    crop: bool = False  # whether the weak view is shifted as well
    bn_clip: int = 512  # samples that the past of the batch-norm statistics counts as, at most

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        require(
            self.queue == 0 or self.queue >= self.window,
            f"queue must be 0 or hold a window of {self.window}",
            self.queue,
        )
        require(self.passes >= 1, "passes must be at least 1", self.passes)
        require(0 <= self.class_start <= 1, "class_start must be in [0, 1]", self.class_start)
        require(self.lr is None or self.lr > 0, "lr must be positive", self.lr)
        require(self.rate_budget > 0, "rate_budget must be positive", self.rate_budget)
        require(0 <= self.momentum < 1, "momentum must be in [0, 1)", self.momentum)
        require(self.cooldown >= 0, "cooldown must not be negative", self.cooldown)
        require(min(self.class_weight, self.global_weight) >= 0, "loss weights must not be negative", self)
        require(0 < self.xi <= 1, "xi must be in (0, 1]", self.xi)
        require(min(self.clip_global, self.clip_class, self.bn_clip) >= 1, "counts must be clipped at 1 or more", self)
        require(
            self.direction in ("symmetric", "one-sided"), "direction must be symmetric or one-sided", self.direction
        )
        require(self.ridge > 0, "ridge must be positive", self.ridge)


# The columns of the paper's table, and the weights of the authors' code, which its numbers were made with: 0.05 (0.5 on
# CIFAR-100) on the mean over classes and on the global divergence.
PAPER: dict[str, dict[str, Any]] = {
    name: {"raw_divergence": True, "class_weight": weight, "global_weight": weight, **column}
    for name, weight, column in (
        ("paper", 0.05, {"window": 256, "lr": 0.01, "tau_tc": -0.001, "clip_global": 1280, "clip_class": 128}),
        ("paper-cifar100", 0.5, {"window": 256, "lr": 1e-4, "tau_tc": -0.001, "clip_global": 1280, "clip_class": 64}),
        ("paper-visda", 0.05, {"window": 128, "lr": 1e-4, "tau_tc": -0.01, "clip_global": 1536, "clip_class": 128}),
        (
            "paper-imagenet",
            0.05,
            {"window": 128, "lr": 7e-5, "tau_tc": -0.01, "clip_global": 1280, "clip_class": 64, "passes": 2},
        ),
    )
}


class Alignment:
    """One set of anchors and the running target Gaussians that are drawn to them.

    The target starts AT the anchors with a full count: started empty, 25 samples in 64 dimensions are singular and the
    divergence explodes.

    The covariance of inferred anchors is a convention, not knowledge, and their means have the wrong scale. So with
    `means_only` the target takes the anchors' covariance and is scaled to their norm, and the means alone are compared.
    """

    def __init__(
        self, anchors: Gaussians, *, ridge: float, clip: int, direction: Direction, means_only: bool, raw: bool = False
    ) -> None:
        count, dim = anchors.mean.shape
        self.anchors = anchors.plus(ridge)
        self.ridge = ridge
        self.direction: Direction = direction
        self.means_only = means_only
        start = anchors.as_family("isotropic") if means_only else anchors
        rank = choose_family(count, dim)[1]
        self.running = RunningGaussians(start, anchors.mean.new_full((count,), float(clip)), clip=clip, rank=rank)
        # The number of directions in which the anchors are wider than the ridge: the divergence grows with it, so
        # dividing by it lets one weight serve narrow and wide networks. Classes of one sample each have none at all.
        effective = float(self.anchors.covariance.trace_solve(anchors.covariance).mean())
        self.scale = 1 / (count if raw else count * max(effective, 1.0))

    def loss(self, features: Tensor, assignment: Tensor) -> tuple[Tensor, Blend]:
        """Compute the mean divergence over Gaussians, up to those without samples here, which are constant."""
        blend = self.running.blend(features, assignment)
        anchors = self.anchors.rows(blend.rows)
        target = blend.gaussians.plus(self.ridge)
        if self.means_only:
            factor = anchors.mean.norm(dim=1) / target.mean.norm(dim=1).clamp_min(1e-12)
            target = Gaussians(target.mean * factor[:, None], anchors.covariance)
        return divergence(anchors, target, self.direction).sum() * self.scale, blend


@register
class TTAC(WindowAdapter):
    """Draw the target's clusters, found by filtered pseudo labels, to the anchors of the source."""

    capabilities = Capabilities(
        name="ttac",
        title="TTAC",
        protocols=("N-O-SF", "N-O-SL"),
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Su et al., Revisiting Realistic Test-Time Training, NeurIPS 2022",
    )
    options_type = TTACOptions
    options: TTACOptions
    presets = PAPER

    def _parameters_to_change(self) -> dict[str, nn.Parameter]:
        backbone = self.classifier.backbone_parameters()
        if not backbone:
            raise ValueError(f"{self.capabilities.title} adapts the backbone, and this model is a linear head alone")
        return backbone

    def _begin(self) -> None:
        options, stats = self.options, self.stats
        assert stats is not None
        self.generator = torch.Generator().manual_seed(options.seed)
        self.queue = SampleQueue(options.queue or options.window, self.classifier.num_classes)
        self.tracker = BatchNormTracker(self.classifier, clip=options.bn_clip)
        rate, momentum = options.lr or options.rate_budget, options.momentum
        self.updater = Updater(self._learning, lambda values: torch.optim.SGD(values, rate, momentum=momentum))
        ridge = options.ridge * float(stats.overall.covariance.diagonal().max())
        self.alignments = {
            name: Alignment(
                anchors,
                ridge=ridge,
                clip=clip,
                direction=options.direction,
                means_only=stats.source_free,
                raw=options.raw_divergence,
            )
            for name, anchors, clip in (
                ("anchor", stats.classes, options.clip_class),
                ("global", stats.overall, options.clip_global),
            )
        }

    def _update(self) -> None:
        options = self.options
        if options.warmup:
            for slots in self.queue.minibatches(options.window, self.generator):
                with torch.no_grad(), self.tracker.following(len(slots)):
                    self.classifier(self.queue.images[slots])
        if options.lr is None:
            self.updater.set_rate(self._rate())
        for number in range(options.passes):
            for slots in self.queue.minibatches(options.window, self.generator):
                self._step(slots, with_classes=number >= options.class_start * options.passes or options.passes == 1)

    def _rate(self) -> float:
        """Derive the rate of a step: what a window may spend, divided by the steps that the passes make of it."""
        steps = self.options.passes * self.queue.minibatch_count(self.options.window)
        return self.options.rate_budget * self.options.window / 256 / steps

    def _step(self, slots: Tensor, *, with_classes: bool) -> None:
        options = self.options
        images = self.queue.images[slots]
        weak = weak_view(images, self.generator, flip=options.flip, crop=options.crop)
        before = self.tracker.snapshot()
        with self.tracker.following(len(slots)):
            features, logits = self.classifier.features_and_logits(weak)
        features = features.to(self.alignments["global"].anchors.mean.dtype)
        posterior = logits.detach().float().softmax(1)
        filtered = filter_pseudo_labels(
            posterior, self.queue.memory.rows(slots),
            xi=options.xi, tau_tc=options.tau_tc, tau_pp=options.tau_pp, cooldown=options.cooldown,
        )  # fmt: skip
        blends: dict[str, Blend] = {}
        losses: dict[str, Tensor] = {}
        everything = torch.zeros_like(filtered.labels)
        for name, weight, assignment in (
            ("anchor", options.class_weight, filtered.assignment),
            ("global", options.global_weight, everything),
        ):
            loss, blends[name] = self.alignments[name].loss(features, assignment)
            if weight and (with_classes or name == "global"):
                losses[name] = weight * loss
        losses |= self._further_losses(images, posterior)
        if self.updater.step(losses):
            for name, blend in blends.items():
                self.alignments[name].running.commit(blend)
            self.queue.remember(slots, filtered.memory)
        else:
            self.tracker.restore(before)

    def _further_losses(self, images: Tensor, posterior: Tensor) -> dict[str, Tensor]:
        """Add weighted losses of a method that builds on this one."""
        return {}

    def counters(self) -> dict[str, int]:
        """Count what has happened since the last reset."""
        return {
            **super().counters(),
            "steps": self.updater.steps,
            "skipped_steps": self.updater.skipped,
            "refused_statistics": self.tracker.refused,
        }

    def _state(self) -> dict[str, Any]:
        return {
            "queue": self.queue.state(),
            "batch_norm": self.tracker.state(),
            "updater": self.updater.state(),
            "generator": self.generator.get_state(),
            "alignments": {name: alignment.running.state() for name, alignment in self.alignments.items()},
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.queue.load(state["queue"])
        self.tracker.load(state["batch_norm"])
        self.updater.load(state["updater"])
        self.generator.set_state(state["generator"])
        for name, alignment in self.alignments.items():
            alignment.running.load(state["alignments"][name])
