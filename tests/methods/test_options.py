"""What holds for the options and steps of all methods, whatever they do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttac
from ttac import Classifier, SourceStatistics, checks
from ttac.adaptation.adapter import Adapter
from ttac.adaptation.method import Batch
from ttac.adaptation.normalisation import FollowingNorms
from ttac.adaptation.step import GradientSteps
from ttac.methods.registry import methods
from ttac.methods.ttac import TTAC
from ttac.model.networks import ResNet


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize(("value", "rule"), [(2.5, "must be a whole number"), (True, "must be a whole number")])
def test_counts_are_whole_numbers(method: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        methods()[method].options_type(seed=value)


def test_limits_are_said_as_people_do() -> None:
    options: Any = methods()["ttac++"].options_type
    for wrong, rule in (
        ({"hold_weight": -1.0}, "hold_weight must be at least 0, not -1.0"),
        ({"lr": 0.0}, "lr must be more than 0, not 0.0"),
        ({"magnitude": 31}, "magnitude must be from 0 to 30, not 31"),
        ({"momentum": 1.0}, "momentum must be at least 0 and less than 1, not 1.0"),
        ({"xi": 0.0}, "xi must be more than 0 and at most 1, not 0.0"),
        ({"predict": "late"}, "predict must be before or during or after, not 'late'"),
        ({"predict": "during"}, "predict must be before or after, not 'during'"),
        ({"ridge": float("inf")}, "ridge must be a finite number, not inf"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
            options(**wrong)


@pytest.mark.parametrize("name", ["class_weight", "global_weight", "hold_weight", "rate"])
def test_what_is_not_finite_is_no_option(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        methods()["ttac"].options_type(**{name: float("nan")})


def test_presets_weigh_the_further_losses_as_the_authors_do() -> None:
    presets = methods()["ttac+shot"].presets
    assert presets["paper"]["information_weight"] == pytest.approx(0.1)
    assert presets["paper-cifar100"]["information_weight"] == pytest.approx(1.0)
    assert methods()["ttac++"].presets["paper-cifar100"]["self_train_weight"] == pytest.approx(10.0)


@pytest.mark.parametrize("method", ["ttac", "ttac++", "ttac+shot"])
def test_the_fast_preset_walks_a_part_of_the_queue_once(method: str) -> None:
    options: Any = methods()[method].options_type(**methods()[method].presets["fast"])
    slow: Any = methods()[method].options_type(**methods()[method].presets["paper"])
    assert options.queue == slow.queue == 4096
    assert options.passes * options.walk * 16 == slow.passes * slow.queue
    assert (options.warmup, slow.warmup) == (False, True)


def test_a_warm_up_without_effect_is_refused() -> None:
    options = methods()["ttac++"].options_type
    with pytest.raises(ValueError, match="unless views is joint-both, not 'joint'"):
        options(warmup=True)  # type: ignore[call-arg]
    options(warmup=True, views="joint-both")  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["ttac++", "tent", "shot", "bn"])
def test_a_walk_bounds_the_steps_of_an_update_and_the_rate_goes_by_them(method: str) -> None:
    classifier = Classifier(ResNet(8, 4, width=4), mean=0, std=1)
    stats = SourceStatistics.infer(classifier) if method == "ttac++" else None
    adapter: Any = ttac.adapt(classifier, method, stats=stats, window=4, queue=16, walk=8, passes=2)
    seen = []
    losses = adapter.method.losses
    adapter.method.losses = lambda batch: (seen.append(batch.slots), losses(batch))[1]
    images = torch.rand(20, 3, 16, 16)
    assert adapter(images).isfinite().all()
    updates = [2 * count for count in (1, 2, 2, 2, 2)]  # two passes of one minibatch, then of two
    assert len(seen) == sum(updates)
    assert all(len(slots) == 4 for slots in seen)
    for last in (seen[-4:-2], seen[-2:]):
        assert set(adapter.memory_in_use.newest(4).tolist()) <= set(torch.cat(last).tolist())
    if method == "ttac++":
        assert adapter.method.rate() == pytest.approx(adapter.options.rate / 4**0.5)


@pytest.mark.parametrize("walk", [-1, 3, 17])
def test_a_walk_holds_a_window_and_fits_the_queue(walk: int) -> None:
    with pytest.raises(ValueError, match="walk"):
        methods()["ttac"].options_type(window=4, queue=16, walk=walk)


@pytest.mark.parametrize(
    "norm", [lambda channels: nn.InstanceNorm2d(channels, affine=True), lambda channels: nn.GroupNorm(1, channels)]
)
def test_tent_takes_every_norm_that_has_affine_parameters(norm: Any) -> None:
    adapter = ttac.adapt(Classifier(ResNet(8, 4, width=4, norm=norm), mean=0, std=1), "tent", window=4)
    adapter(torch.rand(4, 3, 16, 16))
    assert adapter.parameters
    assert adapter.steps.taken == 1


def test_a_pass_without_losses_stores_nothing_that_overflowed() -> None:
    # Both losses are off in the first of two passes, so no gradient can tell.
    adapter = checks.subject("ttac", filter="none", global_weight=0.0, class_start=1.0, queue=0, passes=2).make()
    assert isinstance(adapter.method, TTAC)
    with torch.no_grad():
        adapter.classifier.model.layer3[0].conv2.weight.fill_(3e38)
    adapter(checks.subject("ttac").images[: checks.WINDOW])
    running = adapter.method.alignments["anchor"].running.gaussians
    assert bool(running.mean.isfinite().all())


def test_a_head_with_an_empty_row_has_no_weights_to_rescale(tiny_classifier: Classifier) -> None:
    with torch.no_grad():
        tiny_classifier.head.weight[3] = 0
    with pytest.raises(ValueError, match="3"):
        SourceStatistics.rescale_weights(tiny_classifier)


def test_statistics_are_refused_where_they_are_not_finite_and_not_where_they_are_large() -> None:
    layer = nn.BatchNorm2d(64)
    norms = FollowingNorms(layer, clip=8)
    for scale, fine in ((1e15, True), (float("inf"), False), (1.0, True)):
        before, state = norms.snapshot(), {name: value.clone() for name, value in layer.state_dict().items()}
        with norms.following(4):
            layer(torch.randn(4, 64, 2, 2) * scale)
        found = norms.finite()
        assert found is not None
        assert bool(found) is fine
        if not fine:
            norms.restore(before)
            assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    assert norms.seen == 8
    assert FollowingNorms(nn.GroupNorm(1, 4), clip=8).finite() is None


def test_later_losses_are_part_of_the_step_and_come_when_the_first_are_differentiated() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    steps = GradientSteps({"weight": weight}, lambda values: torch.optim.SGD(values, 0.1))
    nan = float("nan")
    seen: list[Any] = []

    def later() -> Tensor:
        seen.append(None if weight.grad is None else weight.grad.tolist())
        return weight.sum() * 3

    assert steps.take({"later": later, "first": weight[0] * 2})
    assert seen == [[2.0, 0.0]]
    assert weight.tolist() == pytest.approx([0.5, 0.7])
    assert {name: value.item() for name, value in steps.values.items()} == {"later": 6.0, "first": 2.0}
    assert steps.take({"later": later})
    assert weight.tolist() == pytest.approx([0.2, 0.4])
    before = weight.tolist()
    assert not steps.take({"first": weight.sum(), "later": lambda: weight.sum() * nan})
    assert not steps.take({"first": weight.sum() * nan, "later": later})
    assert not steps.take({"first": weight.sum()}, torch.tensor(False))
    assert weight.tolist() == before
    assert steps.take({"first": weight.sum()}, torch.tensor(True))
    assert steps.take({})
    assert (weight.tolist(), steps.taken, steps.skipped) == (pytest.approx([0.1, 0.3]), 3, 3)
    assert weight.grad is None


def test_strong_views_apart_come_when_the_activations_of_the_weak_ones_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    classifier = Classifier(ResNet(8, 4, width=4), mean=0, std=1)
    stats = SourceStatistics.infer(classifier)
    adapter: Any = ttac.adapt(
        classifier, "ttac++", stats=stats, window=4, queue=0, passes=1, views="apart", agreement=0.0
    )
    orders: list[bool] = []
    strong = Batch.strong
    monkeypatch.setattr(
        Batch,
        "strong",
        lambda batch, *rest: (orders.append(classifier_has_gradients(adapter)), strong(batch, *rest))[1],
    )
    adapter(torch.rand(4, 3, 16, 16))
    assert orders == [True]


def classifier_has_gradients(adapter: Any) -> bool:
    return any(value.grad is not None for value in adapter.classifier.parameters())


def test_so_many_images_of_a_minibatch_have_strong_views(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = Classifier(ResNet(8, 4, width=4), mean=0, std=1)
    stats = SourceStatistics.infer(classifier)
    sizes: list[int] = []
    view = Adapter.view
    monkeypatch.setattr(Adapter, "view", lambda adapter, images: (sizes.append(len(images)), view(adapter, images))[1])
    for given, counts in ({"strong_views": 3}, [11]), ({"strong_views": None}, [16]), ({}, [16]):
        adapter = ttac.adapt(
            classifier, "ttac++", stats=stats, window=8, queue=0, passes=1, agreement=0.0, floor=False, **given
        )
        sizes.clear()
        adapter(torch.rand(8, 3, 16, 16))
        assert sizes[:1] == counts
