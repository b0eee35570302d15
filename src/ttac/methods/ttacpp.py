"""TTAC++: TTAC with self-training on strong views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ttac.adaptation.adapter import Adapter
from ttac.adaptation.losses import self_training
from ttac.adaptation.method import EVERY_PROTOCOL, Batch, Capabilities, View
from ttac.adaptation.normalisation import Snapshot
from ttac.adaptation.step import Loss
from ttac.adaptation.strength import ViewStrength, agreement
from ttac.common.options import require, setting
from ttac.common.state import cloned
from ttac.methods.registry import register
from ttac.methods.ttac import FAST, PAPER, TTAC, TTACOptions, contrast
from ttac.model.views import StrongView


@dataclass(frozen=True)
class TTACPlusPlusOptions(TTACOptions):
    """TTAC's options, and those of self-training."""

    strong: StrongView = setting("fixmatch", "kind of strong view; own-range: of faint images too, nothing cut out")
    tau_st: float = setting(0.95, "confidence from which a pseudo label teaches", least=0, most=1)
    self_train_weight: float = setting(0.5, "lambda_2", least=0)
    agreement: float = setting(
        0.9,
        "of answers on strong and weak views, down to which views are made stronger; 0: always full",
        least=0,
        most=1,
    )
    strong_views: int | None = setting(64, "images of a minibatch that have strong views; None: all", least=1)
    views: Literal["joint", "joint-both", "apart"] = setting(
        "joint", "in one batch, in one that the stored statistics follow with strong views and all, or in two"
    )

    def check(self) -> None:
        """Refuse a warm-up that would have no effect."""
        super().check()
        rule = "warmup moves batch-norm statistics that are taken anew after the update, unless views is joint-both"
        require(not self.warmup or self.views == "joint-both", rule, self.views)


# Our step beyond the paper: every depth is aligned, and posteriors are made sharp and even.
DEEP: dict[str, dict[str, Any]] = {"deep": {"depth_weight": 20.0, "information_weight": 1.0}}


@dataclass(frozen=True)
class _Before:
    """What a running update began with."""

    norms: Snapshot
    strength: dict[str, Any]
    taken: int  # steps
    skipped: int


@register
class TTACPlusPlus(TTAC):
    """Teach the strong view of a sample what its weak view is sure of, while the anchors hold the clusters in place."""

    capabilities = Capabilities(
        "ttac++",
        "TTAC++",
        EVERY_PROTOCOL,
        needs=("statistics",),
        changes="backbone, batch-norm statistics",
        citation="Su et al., Revisiting Realistic Test-Time Training: Sequential Inference and Adaptation "
        "by Anchored Clustering Regularized Self-Training",
        may_use=("contrastive branch",),
    )
    options_type = TTACPlusPlusOptions
    # The authors' code weighs self-training 20 times as much as the divergences.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = (
        FAST
        | DEEP
        | {
            name: {
                **preset, "self_train_weight": 20 * preset["class_weight"], "tau_st": 0.95, "views": "joint-both",
                "strong": "fixmatch", "strong_views": None, "operations": 2, "magnitude": None, "agreement": 0.0,
            }
            for name, preset in PAPER.items()
        }
    )  # fmt: skip
    checked_with: ClassVar[Mapping[str, Any]] = {"tau_pp": 0.0, "tau_st": 0.0}
    strength: ViewStrength

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        target = adapter.options.agreement
        self.declare(strength=lambda: ViewStrength(target, self.classifier.device))
        self._before: _Before | None = None

    def before_update(self) -> None:
        """Choose how strong views may be, which the first window tells, and the steps since then."""
        options, steps = self.adapter.options, self.adapter.steps
        strength = cloned(self.strength.state())
        self._before = _Before(self.adapter.norms.snapshot(), strength, steps.taken, steps.skipped)
        if options.self_train_weight and options.agreement:
            if self.strength.known:
                self.strength.follow()
            else:
                self._try_strengths()
        super().before_update()

    def after_update(self, newest: Tensor, logits: Tensor) -> Tensor:
        """Take the window's batch-norm statistics by the weights that will predict it.

        Those that a step leaves behind are of the weights before it, and in a joint batch not of the images alone. On
        an EfficientNet-Lite0 under blur that was the difference between 78 and 73 % error (docs/depths.md). An update
        whose steps were all refused leaves no trace.
        """
        norms, steps, before = self.adapter.norms, self.adapter.steps, self._before
        assert before is not None
        self._before = None
        if steps.taken == before.taken and steps.skipped > before.skipped:
            self.strength.load_state(before.strength)
        elif self.adapter.options.views != "joint-both" and norms.layers:
            stepped = norms.snapshot()
            norms.restore(before.norms)
            with norms.kept_if_finite(stepped), torch.no_grad():
                # As many samples as ever, also where fewer are new: the weights are, for all of them.
                window = self.adapter.memory_in_use.newest(self.adapter.options.window)
                Batch(self.adapter, window, 0).forward()
        return logits

    @torch.no_grad()
    def _try_strengths(self) -> None:
        options = self.adapter.options
        batch = Batch(self.adapter, self.adapter.memory_in_use.newest(options.window), 0)
        posterior = batch.apart(batch.images).posterior
        self.strength.begin(lambda level: float(agreement(posterior, batch.strong(level).logits, options.tau_st)))

    def measures(self) -> dict[str, Tensor | float]:
        """Tell how strong views were, and how far the model answers them as it answers the weak ones."""
        if not self.adapter.options.self_train_weight:
            return super().measures()
        return super().measures() | {"view strength": self.strength.level, "agreement": float(self.strength.agreed)}

    def look(self, batch: Batch) -> tuple[View, View | None]:
        options = self.adapter.options
        if not options.self_train_weight or not options.views.startswith("joint"):
            return super().look(batch)
        both = options.views == "joint-both"
        return batch.pair(self.strength.level, count=self._count(), follow_both=both)

    def further_losses(self, batch: Batch, weak: View, strong: View | None) -> dict[str, Loss]:
        options = self.adapter.options
        posterior = weak.posterior
        if not options.self_train_weight:
            return super().further_losses(batch, weak, strong)
        if strong is None and not options.contrastive_weight:
            # Computed when the weak views' activations are gone, so that both never take memory at once.
            return {"self_train": lambda: self._self_train(batch, self._strong(batch), posterior)}
        strong = strong or self._strong(batch)
        further = contrast(self, weak, strong) if options.contrastive_weight else {}
        return {"self_train": self._self_train(batch, strong, posterior), **further}

    def _count(self) -> int | None:
        """Say how many images have strong views: all where the branch contrasts them."""
        options = self.adapter.options
        return None if options.contrastive_weight else options.strong_views

    def _strong(self, batch: Batch) -> View:
        return batch.strong(self.strength.level, self._count())

    def _self_train(self, batch: Batch, strong: View, posterior: Tensor) -> Tensor:
        options = self.adapter.options
        posterior = posterior[: len(strong.logits)]
        found = agreement(posterior, strong.logits, options.tau_st)
        batch.when_taken(lambda: self.strength.observe(found))
        weight = options.self_train_weight * self.strength.weight()
        return weight * self_training(strong.logits, posterior, options.tau_st)
