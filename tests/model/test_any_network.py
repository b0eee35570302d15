"""Real networks of other libraries, other precisions and many classes adapt without special code."""

from __future__ import annotations

import pytest
import torch

import ttac
from ttac import Classifier, SourceStatistics, checks
from ttac.model.networks import ResNet

timm_models = {
    "resnet18": {},
    "vit_tiny_patch16_224": {"img_size": 16, "patch_size": 8, "depth": 2},
}


@pytest.mark.parametrize("name", timm_models)
def test_timm_models_adapt_and_single_images_give_the_same_updates(name: str) -> None:
    timm = pytest.importorskip("timm", reason="real networks to adapt come from timm: pip install 'ttac[timm]'")
    torch.manual_seed(0)
    classifier = Classifier(timm.create_model(name, num_classes=4, **timm_models[name]).eval())
    subject = checks.subject("ttac++", classifier)
    checks.batches_do_not_matter(subject)
    checks.only_declared_parameters_move(subject)
    adapter = subject.make()
    before = {key: value.detach().clone() for key, value in adapter.classifier.named_parameters()}
    for images in subject.images[:16]:
        adapter(images[None])
    moved = [key for key, value in adapter.classifier.named_parameters() if not torch.equal(value, before[key])]
    assert adapter.counters()["steps"] > 0
    assert adapter.counters()["skipped_steps"] == 0
    assert len(moved) > 0.9 * len(adapter.parameters)


@pytest.mark.parametrize("name", timm_models)
def test_timm_models_adapt_from_their_weights_alone(name: str) -> None:
    timm = pytest.importorskip("timm", reason="real networks to adapt come from timm: pip install 'ttac[timm]'")
    torch.manual_seed(0)
    classifier = Classifier(timm.create_model(name, num_classes=4, **timm_models[name]).eval())
    stats = SourceStatistics.infer(classifier)
    adapter = ttac.adapt(classifier, "ttac++", stats=stats, window=8, queue=16, passes=2, tau_pp=0.0, tau_st=0.0)
    logits = adapter(checks.subject("test", classifier).images)
    assert bool(logits.isfinite().all())
    assert adapter.counters()["steps"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", ["tent", "ttac++"])
def test_other_precisions(method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    classifier = Classifier(ResNet(8, 4, width=4), mean=0, std=1).eval().to(dtype)
    subject = checks.subject(method, classifier)
    checks.state_round_trips(subject)
    checks.one_class_survives(subject)
    adapter = subject.make()
    before = {name: value.detach().clone() for name, value in adapter.classifier.named_parameters()}
    logits = adapter(subject.images)
    assert logits.dtype == dtype
    moved = [name for name, value in adapter.classifier.named_parameters() if not torch.equal(value, before[name])]
    assert len(moved) > 0.8 * len(adapter.parameters)
    assert adapter.counters()["steps"] > 0
    assert adapter.counters()["skipped_steps"] == 0


def test_a_thousand_classes_adapt_with_low_rank_anchors() -> None:
    torch.manual_seed(0)
    classes = 1000
    classifier = Classifier(ResNet(8, classes, width=4), mean=0, std=1).eval()
    images = torch.rand(classes, 3, 8, 8)
    stats = SourceStatistics.collect(
        classifier, zip(images.split(250), torch.arange(classes).split(250), strict=True), family="low-rank", rank=3
    )
    adapter = ttac.adapt(classifier, "ttac++", stats=stats, window=16, queue=32, passes=2, tau_pp=0.0, tau_st=0.0)
    logits = adapter(images[:48])
    assert bool(logits.isfinite().all())
    assert adapter.counters()["steps"] > 0
    assert adapter.counters()["skipped_steps"] == 0
