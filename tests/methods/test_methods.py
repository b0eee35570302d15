"""What is particular to methods; what all of them promise is in test_conformance.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ttac
from ttac import Classifier, SourceStatistics, checks
from ttac.adaptation.adapter import Adapter
from ttac.adaptation.alignment import Alignment
from ttac.adaptation.step import COSTLY_EVERY, Loss
from ttac.gaussian import RunningGaussians
from ttac.methods.ttac import TTAC
from ttac.methods.ttacpp import TTACPlusPlus
from ttac.model.networks import ResNet
from ttac.model.views import strong_view


def test_an_impure_prediction_is_caught() -> None:
    honest = checks.subject("bn")

    def impure() -> Adapter:
        adapter = honest.make()
        real = adapter.predict
        adapter.predict = lambda images: (adapter.memory_in_use.push(images), real(images))[1]  # type: ignore[func-returns-value,method-assign]
        return adapter

    with pytest.raises(checks.CheckError, match="predict changed the state"):
        checks.predict_is_pure(checks.Subject(impure, honest.images))


# Options


def test_unknown_names_raise_and_name_the_close_ones(tiny_classifier: Classifier) -> None:
    stats = SourceStatistics.infer(tiny_classifier)
    with pytest.raises(ValueError, match=r"unknown method: 'ttacpp'; did you mean ttac"):
        ttac.adapt(tiny_classifier, "ttacpp", stats=stats)
    with pytest.raises(ValueError, match=r"unknown option of ttac\+\+: 'windows'; did you mean window"):
        ttac.adapt(tiny_classifier, "ttac++", stats=stats, windows=3)
    with pytest.raises(ValueError, match=r"unknown preset of ttac\+\+: 'papers'; did you mean paper"):
        ttac.adapt(tiny_classifier, "ttac++", stats=stats, preset="papers")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 1), ("queue", 100), ("predict", "during"), ("passes", 0), ("lr", -1.0), ("direction", "both"),
        ("magnitude", 31), ("seed", -1), ("reset_every", -1), ("class_start", 1.1), ("tau_st", 2.0), ("xi", 0.0),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(name: str, value: Any, tiny_classifier: Classifier) -> None:
    with pytest.raises(ValueError, match=name):
        ttac.adapt(tiny_classifier, "ttac++", stats=SourceStatistics.infer(tiny_classifier), **{name: value})


def test_presets_hold_the_numbers_of_the_paper(tiny_classifier: Classifier) -> None:
    stats = SourceStatistics.infer(tiny_classifier)
    expected = {
        "paper": (256, 0.01, 4096, 4, -0.001, 0.9, 0.95, 1280, 128),
        "paper-cifar100": (256, 0.0001, 4096, 4, -0.001, 0.9, 0.95, 1280, 64),
        "paper-visda": (128, 0.0001, 4096, 4, -0.01, 0.9, 0.95, 1536, 128),
        "paper-imagenet": (128, 0.00007, 4096, 2, -0.01, 0.9, 0.95, 1280, 64),
    }
    names = ("window", "lr", "queue", "passes", "tau_tc", "tau_pp", "tau_st", "clip_global", "clip_class")
    for preset, numbers in expected.items():
        options = ttac.adapt(tiny_classifier, "ttac++", stats=stats, preset=preset).options
        assert tuple(getattr(options, name) for name in names) == numbers
    assert ttac.adapt(tiny_classifier, "ttac++", stats=stats, preset="paper", passes=1).options.passes == 1


def test_statistics_are_asked_for_and_checked(tiny_classifier: Classifier) -> None:
    with pytest.raises(
        ValueError, match=r"TTAC\+\+ .*needs to know the statistics of the source, and is given nothing: pass stats="
    ):
        ttac.adapt(tiny_classifier, "ttac++")
    torch.manual_seed(3)
    other = Classifier(ResNet(8, 10, width=4), mean=0, std=1)
    with pytest.raises(ValueError, match="belong to the model"):
        ttac.adapt(other, "ttac++", stats=SourceStatistics.infer(tiny_classifier))
    with pytest.raises(TypeError, match=r"wrap it in ttac\.Classifier"):
        ttac.adapt(other.model, "test")  # type: ignore[arg-type]


def test_adapting_leaves_the_users_model_alone(tiny_classifier: Classifier) -> None:
    before = tiny_classifier.fingerprint()
    subject = checks.subject("ttac++", tiny_classifier)
    adapter = subject.make()
    adapter(subject.images)
    assert tiny_classifier.fingerprint() == before
    assert adapter.classifier.fingerprint() != before
    assert all(parameter.requires_grad for parameter in tiny_classifier.parameters())


def test_damaged_states_are_refused_and_change_nothing() -> None:
    subject = checks.subject("ttac++")
    adapter = subject.make()
    adapter(subject.images)
    good = adapter.state_dict()
    logits = adapter.predict(subject.images)
    for path, value in (
        (("method",), "tent"),
        (("options",), {**good["options"], "window": 9}),
        (("fingerprint",), "0"),
        (("classifier",), {}),
        (("state", "method", "alignments"), {}),
        (("state", "memory"), {"fresh": 0}),
        (("knowledge",), {"statistics": "0"}),
    ):
        bad = copy.deepcopy(good)
        place = bad
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(ValueError, match=r"the state is"):
            adapter.load_state_dict(bad)
        assert checks._same(adapter.state_dict(), good)
        assert torch.equal(adapter.predict(subject.images), logits)


# TENT and BN


@pytest.mark.parametrize("method", ["tent", "conjugate"])
def test_a_window_is_predicted_after_its_step(method: str) -> None:
    subject = checks.subject(method, queue=0, passes=1, bn_clip=1, lr=0.1)
    adapter = subject.make()
    model = adapter.classifier.copy().eval().requires_grad_(False)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    affine = [value.requires_grad_(True) for module in norms for value in (module.weight, module.bias)]
    optimizer = torch.optim.Adam(affine, 0.1)
    for images in subject.batches()[:3]:
        for module in norms:
            module.train().momentum = 1.0  # the stored statistics are those of the window
        logits = model(images)
        loss = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(adapter(images), model.eval()(images).detach(), rtol=1e-3, atol=1e-4)


def test_tent_is_the_published_loop() -> None:
    subject = checks.subject("tent", queue=0, passes=1, predict="during")
    adapter = subject.make()
    ours = torch.cat([adapter(images) for images in subject.batches()[:5]])
    model = subject.make().classifier
    model.requires_grad_(False)
    parameters = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
            parameters += [module.weight.requires_grad_(True), module.bias.requires_grad_(True)]
    optimizer = torch.optim.Adam(parameters, 1e-3)
    theirs = []
    for images in subject.batches()[:5]:
        logits = model(images)
        loss = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(logits.detach())
    torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-4, atol=1e-5)


def test_the_loss_that_tent_tells_is_the_entropy_of_its_window() -> None:
    subject = checks.subject("tent", queue=0, passes=1)
    adapter = subject.make()
    for images in subject.batches()[:3]:
        model = adapter.classifier.copy()
        for module in model.modules():
            module.training = isinstance(module, nn.BatchNorm2d)
        posterior = model(images).detach().double().softmax(1)
        by_hand = sum(-float(p) * math.log(p) for row in posterior for p in row) / len(images)
        adapter(images)
        assert set(adapter.last_step.losses) == {"entropy"}
        assert float(adapter.last_step.losses["entropy"]) == pytest.approx(by_hand, rel=1e-4)
    adapter(images[:3])  # no step, no loss
    assert adapter.last_step.losses == {}


def test_a_record_has_the_curve_of_the_losses() -> None:
    subject = checks.subject("ttac++")
    adapter = subject.make()
    stream = [(images, torch.arange(len(images)) % 4) for images in subject.batches(checks.WINDOW // 2)]
    record = ttac.evaluate(adapter, stream, "N-O-SL")
    assert [samples for samples, _ in record.losses] == [8, 16, 24, 32, 40]  # where windows were full
    assert {name for _, losses in record.losses for name in losses} == {"anchor", "global", "self_train"}
    assert all(value > 0 for _, losses in record.losses for value in losses.values())
    assert all("self_train" in losses for _, losses in record.losses)
    sampled = adapter.steps.taken // COSTLY_EVERY + 1  # the values of divergences are not told at every step
    assert 1 <= sum("global" in losses for _, losses in record.losses) <= sampled
    without = ttac.evaluate(checks.subject("bn").make(), stream, "N-O-SF")
    assert without.losses == []


def test_the_divergences_that_are_told_are_those_of_the_running_gaussians() -> None:
    subject = checks.subject("ttac", queue=0, passes=1, class_weight=0.3, global_weight=0.6)
    adapter = subject.make()
    assert isinstance(adapter.method, TTAC)
    adapter(subject.images[: checks.WINDOW])
    for name, weight in (("anchor", 0.3), ("global", 0.6)):
        alignment = adapter.method.alignments[name]
        expected = weight * alignment.scale * float(alignment.distances().sum())
        assert float(adapter.last_step.losses[name]) == pytest.approx(expected)
        assert expected > 0


@pytest.mark.parametrize("size", [1, 7, 44])
@pytest.mark.parametrize("method", ["bn", "tent"])
def test_every_stretch_between_resets_is_a_fresh_adapters(method: str, size: int) -> None:
    """Of a queue of one window nothing random is drawn but the order within a batch, which they do not depend on."""
    every = 20  # two windows and a half
    options: dict[str, Any] = {"queue": 0, "passes": 1}
    subject = checks.subject(method, reset_every=every, **options)
    adapter = subject.make()
    found = torch.cat([adapter(images) for images in subject.batches(size)])
    expected = []
    borders = sorted({*range(0, len(subject.images), size), *range(0, len(subject.images), every), len(subject.images)})
    for start, end in pairwise(borders):
        if start % every == 0:
            fresh = checks.subject(method, **options).make()
        expected.append(fresh(subject.images[start:end]))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
    whole = checks.subject(method, **options).make()
    assert not torch.allclose(found, whole(subject.images), rtol=1e-4, atol=1e-5)


def test_tent_refuses_a_model_without_norm_layers() -> None:
    with pytest.raises(ValueError, match="this model has none"):
        ttac.adapt(Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), mean=0, std=1), "tent")


def test_bn_ends_at_the_statistics_of_the_stream() -> None:
    subject = checks.subject("bn", bn_clip=10**6, queue=0, passes=1)
    adapter = subject.make()
    images = subject.images[:40]
    adapter(images)
    layer = adapter.classifier.model.bn1
    with torch.no_grad():
        inputs = adapter.classifier.model.conv1(images)
    torch.testing.assert_close(layer.running_mean, inputs.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


# TTAC


def test_a_step_is_the_written_algorithm() -> None:
    """One update of one window against the method page, written down naively."""
    subject = checks.subject(
        "ttac++", queue=0, passes=1, warmup=False, flip=False, tau_pp=0.3, operations=0, lr=0.1, trust=0.0, floor=False,
        self_train_weight=0.7, class_weight=0.3, global_weight=0.6, clip_class=32, clip_global=64, strong="own-range",
        filter="temporal+posterior", momentum=0.0, depth_weight=0.0, information_weight=0.0,
        views="joint", agreement=0.0,
    )  # fmt: skip
    adapter = subject.make()
    assert isinstance(adapter.method, TTAC)
    stats, model = adapter.stats, adapter.classifier.copy()
    assert stats is not None
    images = subject.images[: checks.WINDOW]
    adapter(images)

    for module in model.modules():
        module.training = isinstance(module, nn.BatchNorm2d)
    # The strong view is a crop alone here (no operations): draw it as the adapter did. Both are normalised together.
    generator = torch.Generator().manual_seed(0)
    images = images[torch.randperm(checks.WINDOW, generator=generator)]
    strong = strong_view(images, generator, flip=False, kind="own-range", operations=0)
    both, all_logits = model.features_and_logits(torch.cat([images, strong]))
    features, logits = both[: checks.WINDOW], all_logits[: checks.WINDOW]
    posterior = logits.softmax(1).detach()
    ridge = float(stats.overall.covariance.dense().diagonal(dim1=1, dim2=2).max()) / 30
    eye = torch.eye(features.shape[1])

    def symmetric(mean_s: Tensor, cov_s: Tensor, mean_t: Tensor, cov_t: Tensor) -> Tensor:
        source = torch.distributions.MultivariateNormal(mean_s, cov_s + ridge * eye)
        target = torch.distributions.MultivariateNormal(mean_t, cov_t + ridge * eye)
        return torch.distributions.kl_divergence(source, target) + torch.distributions.kl_divergence(target, source)

    def blended(mean: Tensor, cov: Tensor, own: Tensor, clip: int) -> tuple[Tensor, Tensor]:
        delta = (own - mean).sum(0) / clip
        scatter = torch.stack([torch.outer(z - mean, z - mean) - cov for z in own]).sum(0) / clip
        return mean + delta, cov + scatter - torch.outer(delta, delta)

    def effective(covariances: Tensor) -> float:
        values = torch.linalg.eigvalsh(covariances)
        return max(1.0, float((values / (values + ridge)).sum(-1).mean()))

    classes, overall = stats.classes, stats.overall
    loss_ac = torch.zeros(())
    for k in range(4):
        own = features[(posterior.argmax(1) == k) & (posterior.amax(1) > 0.3)]
        if len(own):
            pair = classes.mean[k], classes.covariance.dense()[k]
            loss_ac = loss_ac + symmetric(*pair, *blended(*pair, own, 32)) / 4 / effective(classes.covariance.dense())
    pair = overall.mean[0], overall.covariance.dense()[0]
    loss_ga = symmetric(*pair, *blended(*pair, features, 64)) / effective(overall.covariance.dense())
    loss_st = F.cross_entropy(all_logits[checks.WINDOW :], posterior.argmax(1))  # tau_st is 0 in the suite
    total = 0.3 * loss_ac + 0.6 * loss_ga + 0.7 * loss_st
    parameters = {name: value for name, value in model.named_parameters() if ".fc." not in name}
    gradients = torch.autograd.grad(total, list(parameters.values()))
    assert float(loss_ac.detach()) > 0
    for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
        moved = dict(adapter.classifier.named_parameters())[name]
        torch.testing.assert_close(moved, value - 0.1 * gradient, rtol=1e-3, atol=2e-5, msg=name)
    assert torch.equal(adapter.classifier.head.weight, model.head.weight)
    # The stored statistics are those of the images alone, by the weights after the step.
    with torch.no_grad():
        inputs = adapter.classifier.model.conv1(images)
    torch.testing.assert_close(adapter.classifier.model.bn1.running_mean, inputs.mean((0, 2, 3)))


def test_a_first_update_that_is_refused_leaves_the_strength_of_views_unknown() -> None:
    subject = checks.subject("ttac++", agreement=1.0)
    adapter, fresh = subject.make(), subject.make()
    first, second, *_ = subject.batches()
    handle = next(iter(adapter.parameters.values())).register_hook(lambda gradient: gradient * torch.inf)
    adapter(first)
    handle.remove()
    assert adapter.counters()["steps"] == 0
    assert checks._same(adapter.state_dict()["classifier"], fresh.state_dict()["classifier"])
    assert checks._same(adapter.state_dict()["state"]["method"], fresh.state_dict()["state"]["method"])
    adapter(second)
    assert isinstance(adapter.method, TTACPlusPlus)
    assert adapter.method.strength.known


def test_a_loss_that_is_not_finite_skips_the_step_and_restores_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = checks.subject("ttac++")
    first, second, *_ = subject.batches()
    adapter, twin = subject.make(), subject.make()
    for each in (adapter, twin):
        each(first)
    before = adapter.state_dict()
    real = Alignment.pull

    def spoilt(*args: Any) -> Any:
        surrogate, blend = real(*args)
        return replace(surrogate, gradients=tuple(gradient * torch.nan for gradient in surrogate.gradients)), blend

    monkeypatch.setattr(Alignment, "pull", spoilt)
    adapter(second)
    after = adapter.state_dict()
    steps = adapter.options.passes * 2
    assert adapter.counters()["skipped_steps"] == steps
    assert checks._same(before["classifier"], after["classifier"])
    assert checks._same(before["state"]["method"], after["state"]["method"])
    assert checks._same(before["state"]["norms"], after["state"]["norms"])
    assert checks._same(before["state"]["steps"]["optimizer"]["state"], after["state"]["steps"]["optimizer"]["state"])
    for name, column in adapter.memory_in_use.columns.items():
        assert torch.equal(column[: checks.WINDOW], before["state"]["memory"]["columns"][name][: checks.WINDOW])
    monkeypatch.undo()
    assert bool(adapter(subject.batches()[2]).isfinite().all())
    assert adapter.counters()["steps"] > before["state"]["steps"]["taken"]


@pytest.mark.parametrize(
    ("method", "options"),
    [("bn", {}), ("tent", {}), ("ttac++", {}), ("ttac++", {"warmup": True, "views": "joint-both"})],
)
def test_images_that_overflow_the_network_do_not_poison_it(method: str, options: dict[str, Any]) -> None:
    subject = checks.subject(method, **options)
    adapter = subject.make()
    first, second, third, *_ = subject.batches()
    adapter(first)
    good = adapter.predict(third)
    stem = adapter.classifier.model.conv1
    handle = stem.register_forward_hook(lambda _module, _inputs, output: output * torch.inf)
    before = adapter.state_dict()["classifier"]
    adapter(second)
    handle.remove()
    assert checks._same(before, adapter.state_dict()["classifier"])
    assert adapter.counters()["skipped_steps"] > 0
    assert torch.equal(adapter.predict(third), good)
    assert bool(adapter(third).isfinite().all())


def test_a_size_that_the_model_cannot_take_is_refused_and_the_right_one_still_goes() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 64, 3))
    adapter = ttac.adapt(Classifier(network.eval(), mean=0, std=1), "bn", window=4)
    with pytest.raises(ValueError, match="the model does not take images of 3 x 9 x 9"):
        adapter(torch.rand(2, 3, 9, 9))
    assert adapter(torch.rand(6, 3, 8, 8)).shape == (6, 3)
    assert adapter(torch.rand(2, 3, 8, 8, dtype=torch.float64)).shape == (2, 3)  # another precision is only converted


def test_a_state_made_with_other_statistics_is_refused(tiny_classifier: Classifier) -> None:
    inferred, rescaled = SourceStatistics.infer(tiny_classifier), SourceStatistics.rescale_weights(tiny_classifier)
    state = ttac.adapt(tiny_classifier, "ttac", stats=inferred).state_dict()
    with pytest.raises(ValueError, match="the state is of another knowledge"):
        ttac.adapt(tiny_classifier, "ttac", stats=rescaled).load_state_dict(state)


def test_a_head_alone_has_no_backbone_to_adapt() -> None:
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), mean=0, std=1)
    with pytest.raises(ValueError, match="this model is a linear head alone"):
        ttac.adapt(classifier, "ttac", stats=SourceStatistics.rescale_weights(classifier))


def test_gradients_that_are_not_finite_skip_the_step() -> None:
    subject = checks.subject("ttac")
    adapter = subject.make()
    handle = next(iter(adapter.parameters.values())).register_hook(lambda gradient: gradient * torch.inf)
    before = {name: value.detach().clone() for name, value in adapter.classifier.named_parameters()}
    adapter(subject.images)
    handle.remove()
    assert adapter.counters()["steps"] == 0
    assert adapter.counters()["skipped_steps"] > 0
    assert all(torch.equal(value, before[name]) for name, value in adapter.classifier.named_parameters())


def test_the_class_loss_starts_late_and_the_rate_falls_with_the_root_of_the_steps() -> None:
    subject = checks.subject("ttac", passes=4, queue=16, class_start=0.5, rate=0.04)
    adapter = subject.make()
    seen: list[tuple[bool, float]] = []
    real = adapter.steps.take

    def spy(losses: Mapping[str, Loss], sound: Tensor | None) -> bool:
        seen.append(("anchor" in losses, adapter.steps.optimizer.param_groups[0]["lr"]))
        return real(losses, sound)

    adapter.steps.take = spy  # type: ignore[assignment,method-assign]
    adapter(subject.images[:16])
    # The first window fills half of the queue: one minibatch a pass; the second fills it: two.
    assert [late for late, _ in seen] == [False] * 2 + [True] * 2 + [False] * 4 + [True] * 4
    assert [rate for _, rate in seen] == pytest.approx([0.04 / 4**0.5] * 4 + [0.04 / 8**0.5] * 8)


def test_inferred_anchors_are_compared_free_of_scale() -> None:
    torch.manual_seed(0)
    mean = torch.rand(3, 5, dtype=torch.float64)
    anchors = ttac.source.infer.anchors_around(mean)[0]  # type: ignore[attr-defined]
    options: dict[str, Any] = {"ridge": 0.01, "clip": 16, "direction": "symmetric", "means_only": True}
    features, labels = torch.rand(12, 5, dtype=torch.float64), torch.arange(12) % 3
    distances = []
    for scale in (1.0, 10.0):
        alignment = Alignment(anchors, **options)
        start = alignment.running.gaussians
        counts = torch.zeros(3, dtype=torch.float64)
        alignment.running = RunningGaussians(start, counts, clip=16)  # empty, so that the scale is the features' own
        alignment.running.commit(alignment.running.blend(scale * features, labels))
        distances.append(alignment.distances())
    torch.testing.assert_close(distances[0], distances[1])
    assert bool((distances[0] > 0).all())


def test_alignment_draws_features_to_the_anchors() -> None:
    torch.manual_seed(0)
    features = torch.randn(200, 4)
    running = RunningGaussians.empty(1, 4, family="full")
    everything = torch.zeros(200, dtype=torch.long)
    running.commit(running.blend(features, everything))
    alignment = Alignment(running.gaussians, ridge=0.05, clip=200, direction="symmetric", means_only=False)
    shift = nn.Parameter(torch.full((4,), 2.0))
    optimizer = torch.optim.SGD([shift], 0.5)
    for _ in range(100):
        pull, _ = alignment.pull(features + shift, everything)
        optimizer.zero_grad()
        torch.autograd.backward(pull.tensors, pull.gradients)
        optimizer.step()
    assert float(shift.detach().abs().max()) < 0.05
    assert float(alignment.distances()) == pytest.approx(0, abs=1e-4)  # nothing was committed


def test_self_training_ignores_what_the_weak_view_is_not_sure_of() -> None:
    options = {"class_weight": 0.0, "global_weight": 0.0, "warmup": False, "tau_st": 1.0}
    subject = checks.subject("ttac++", **options)
    adapter = subject.make()
    before = {name: value.detach().clone() for name, value in adapter.classifier.named_parameters()}
    adapter(subject.images)
    assert all(torch.equal(value, before[name]) for name, value in adapter.classifier.named_parameters())


@pytest.mark.parametrize("method", ["tent", "adacontrast", "t3a", "ttac++"])
def test_a_copied_adapter_is_independent(method: str) -> None:
    subject = checks.subject(method)
    adapter = subject.make()
    adapter(subject.images)
    copied = copy.deepcopy(adapter)
    before = adapter.state_dict()
    copied.reset()
    assert torch.equal(copied(subject.images), subject.make()(subject.images))
    assert checks._same(adapter.state_dict(), before)


def test_the_class_loss_is_told_however_many_steps_an_update_has() -> None:
    subject = checks.subject("ttac", queue=0, passes=2)
    adapter = subject.make()
    told: set[str] = set()
    for images in subject.images.repeat(10, 1, 1, 1).split(checks.WINDOW):
        adapter(images)
        told |= adapter.last_step.losses.keys()
    assert told == {"anchor", "global"}
