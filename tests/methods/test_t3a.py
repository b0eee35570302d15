"""T3A against the published loop, and what becomes of its supports."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ttac
from ttac import Classifier, checks
from ttac.adaptation.adapter import Adapter
from ttac.methods.t3a import T3A, PrototypeAnswers, surest
from ttac.model.networks import ResNet


def network() -> Classifier:
    torch.manual_seed(0)
    return Classifier(ResNet(8, 4, width=4), mean=0, std=1).eval()


def prototypes_of(adapter: Adapter) -> PrototypeAnswers:
    assert isinstance(adapter.answers, PrototypeAnswers)
    return adapter.answers


def test_only_unbounded_supports_are_exempt_from_a_bound_on_memory() -> None:
    with pytest.raises(checks.CheckError, match="memory grows"):
        checks.memory_plateaus(checks.subject("t3a", keep=None))
    assert set(checks.subject("t3a", keep=None).make().exempt) == {"memory_plateaus"}
    assert not checks.subject("t3a").make().exempt


def published(model: Classifier, batches: list[Tensor], keep: int | None) -> tuple[list[Tensor], Tensor]:
    """The published loop, with lists and one support at a time: logits by batch, and the prototypes at the end."""
    head = model.head

    def support(feature: Tensor) -> tuple[Tensor, float, int]:
        posterior = head(feature).softmax(0)
        return feature / feature.norm(), -float((posterior * posterior.log()).sum()), int(posterior.argmax())

    supports = [support(row) for row in head.weight]
    outputs = []
    for images in batches:
        features = model.features(images)
        supports += [support(feature) for feature in features]
        columns = []
        for k in range(model.num_classes):
            own = sorted((item for item in supports if item[2] == k), key=lambda item: item[1])[:keep]
            total = sum((item[0] for item in own), torch.zeros(model.feature_dim))
            columns.append(total / total.norm().clamp_min(1e-12))
        prototypes = torch.stack(columns)
        outputs.append(features @ prototypes.T)
    return outputs, prototypes


@pytest.mark.parametrize("keep", [1, 3, None])
@torch.no_grad()
def test_it_is_the_published_loop(keep: int | None) -> None:
    subject = checks.subject("t3a", keep=keep, queue=0, passes=1)
    batches = subject.batches()[:5]
    adapter = subject.make()
    assert isinstance(adapter.method, T3A)
    found = prototypes_of(adapter)
    ours = [adapter(images) for images in batches]
    theirs, prototypes = published(subject.make().classifier, batches, keep)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.prototypes, prototypes, rtol=1e-4, atol=1e-6)
    counts = adapter.counters()
    assert counts["supports"] + counts["dropped_supports"] == 4 + 40
    assert (counts["dropped_supports"] == 0) == (keep is None)
    assert counts["supports"] == len(found.supports.labels)
    assert keep is None or int(found.supports.labels.bincount().max()) <= keep


@torch.no_grad()
def test_it_starts_as_the_cosine_to_the_heads_rows() -> None:
    model = network()
    model.head.bias.zero_()
    F.normalize(torch.randn(4, model.feature_dim), dim=1, out=model.head.weight)  # each row is its own class's
    images = torch.rand(3, 3, 8, 8)
    logits = ttac.adapt(model, "t3a").predict(images)
    torch.testing.assert_close(logits, model.features(images) @ F.normalize(model.head.weight, dim=1).T)


def test_the_surest_supports_are_the_same_one_by_one_and_ties_go_to_the_earlier() -> None:
    generator = torch.Generator().manual_seed(0)
    entropies = torch.randint(0, 4, (60,), generator=generator).float()  # with many ties
    labels = torch.randint(0, 3, (60,), generator=generator)
    for keep in (1, 4, 100):
        at_once = surest(entropies, labels, keep).tolist()
        one_by_one: list[int] = []
        for index in range(60):
            candidates = torch.tensor([*one_by_one, index])
            one_by_one = candidates[surest(entropies[candidates], labels[candidates], keep)].tolist()
        naive = sorted(
            index
            for k in range(3)
            for index in sorted((i for i in range(60) if labels[i] == k), key=lambda i: float(entropies[i]))[:keep]
        )
        assert at_once == one_by_one == naive


def test_statistics_follow_the_stream_as_those_of_bn_do() -> None:
    subject, reference = checks.subject("t3a", follow=True), checks.subject("bn")
    adapter, bn = subject.make(), reference.make()
    for images in subject.batches():
        adapter(images)
        bn(images)
    assert checks._same(dict(adapter.classifier.state_dict()), dict(bn.classifier.state_dict()))
    still = checks.subject("t3a").make()
    still(subject.images)
    assert still.classifier.fingerprint() == still.source_fingerprint


def test_features_that_are_not_finite_make_no_supports() -> None:
    subject = checks.subject("t3a")
    adapter = subject.make()
    first, second, third, *_ = subject.batches()
    adapter(first)
    good = adapter.predict(third)
    handle = adapter.classifier.model.conv1.register_forward_hook(lambda _module, _inputs, output: output * torch.inf)
    adapter(second)
    handle.remove()
    assert adapter.counters()["refused_supports"] == checks.WINDOW
    assert torch.equal(adapter.predict(third), good)


def test_half_precision_keeps_its_supports_in_single() -> None:
    adapter = checks.subject("t3a", network().bfloat16(), side=8).make()
    assert adapter(torch.rand(10, 3, 8, 8)).dtype == torch.float32
    supports = prototypes_of(adapter).supports
    assert supports.features.dtype == supports.entropies.dtype == torch.float32


def test_options_are_checked(tiny_classifier: Classifier) -> None:
    assert ttac.adapt(tiny_classifier, "t3a").options.keep == 100
    for keep in (0, -1):
        with pytest.raises(ValueError, match="keep"):
            ttac.adapt(tiny_classifier, "t3a", keep=keep)
