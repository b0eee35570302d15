"""Every method keeps every promise of `ttac.checks`, and methods that break one are caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttac import Classifier, checks
from ttac.adaptation.adapter import Adapter
from ttac.adaptation.method import Batch
from ttac.adaptation.step import Loss
from ttac.methods.registry import methods
from ttac.methods.tent import Tent
from ttac.model.networks import ResNet

METHODS = tuple(methods())
ALONE = {"queue": 0, "passes": 1}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bn", {"predict": "during"}),
    ("t3a", {"keep": None}),
    ("t3a", {"follow": True}),
    ("t3a", {"predict": "before"}),
    ("conjugate", {"source_loss": "poly"}),
    ("ttac", {"filter": "soft"}),
    ("ttac", {"predict": "before", "direction": "one-sided"}),
    ("ttac", {"source_free": True}),
    ("ttac++", {"source_free": True}),
    ("ttac++", {"warmup": True, "views": "joint-both", "walk": 12}),
    ("ttac++", {"contrastive_weight": 1.0}),
    ("ttt++", {"contrastive_weight": 1.0, "operations": 0, "passes": 1}),
    # Half of the stream, so that its end is always as far from a reset and memory can be compared there.
    ("tent", {"reset_every": 22}),
    ("shot", {"reset_every": 22}),
]


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_its_promises(method: str) -> None:
    checks.run_all(method)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, group_norm], ids=["batch", "group"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "test"])
def test_without_a_queue_and_without_batch_norm_too(method: str, norm: Any) -> None:
    torch.manual_seed(0)
    checks.run_all(method, Classifier(ResNet(8, 4, width=4, norm=norm), mean=0, std=1).eval(), side=8, **ALONE)


@pytest.mark.parametrize(("method", "options"), VARIANTS, ids=[f"{m}-{'-'.join(o)}" for m, o in VARIANTS])
def test_variants_keep_them_too(method: str, options: dict[str, Any]) -> None:
    checks.run_all(method, side=8, **options)


# Broken on purpose


class Peeking(Tent):
    """Lets the rest of an arrival, which has not been predicted yet, change an update."""

    peeked: Tensor | float = 1.0

    def check_images(self, images: Tensor) -> None:
        self.peeked = images.mean()

    def losses(self, batch: Batch) -> dict[str, Loss]:
        return {name: loss * self.peeked for name, loss in super().losses(batch).items()}  # type: ignore[operator]


class Forgetful(Tent):
    """Keeps something between updates that it does not declare."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.updates = 0

    def losses(self, batch: Batch) -> dict[str, Loss]:
        self.updates += 1
        return {name: loss / self.updates for name, loss in super().losses(batch).items()}  # type: ignore[operator]


class Dead(Tent):
    """Has a loss that is always zero."""

    def losses(self, batch: Batch) -> dict[str, Loss]:
        return {name: 0 * loss for name, loss in super().losses(batch).items()}  # type: ignore[operator]


class Idle(Tent):
    """Names parameters and moves none of them, though its loss is not zero."""

    def losses(self, batch: Batch) -> dict[str, Loss]:
        return {name: loss.detach() for name, loss in super().losses(batch).items()}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (Peeking, "arrival batches change the updates"),
        (Forgetful, "predictions after reset differ"),
        (Dead, "none of the declared parameters has moved"),
        (Idle, "none of the declared parameters has moved"),
    ],
)
def test_a_broken_method_is_caught(broken: type[Tent], promise: str) -> None:
    with pytest.raises(checks.CheckError, match=promise):
        checks.run_all(broken)


def test_a_loss_that_is_always_zero_is_caught_by_itself() -> None:
    with pytest.raises(checks.CheckError, match="all losses are zero: entropy"):
        checks.losses_are_alive(checks.subject(Dead))


def test_a_forgotten_state_is_caught_by_saving_too() -> None:
    with pytest.raises(checks.CheckError, match="after a round trip"):
        checks.state_round_trips(checks.subject(Forgetful))
