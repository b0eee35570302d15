"""AdaContrast against the published step, written down naively, and its memory against what it must hold."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ttac
from ttac import Classifier, checks
from ttac.adaptation.adapter import Adapter
from ttac.evaluation.protocols import ProtocolError
from ttac.methods.adacontrast import AdaContrast, Ring
from ttac.model.networks import ResNet
from ttac.model.views import strong_view

PLAIN: dict[str, Any] = {"queue": 0, "passes": 1, "flip": False, "crop": False, "operations": 0}


def method_of(adapter: Adapter) -> AdaContrast:
    assert isinstance(adapter.method, AdaContrast)
    return adapter.method


def training(model: Classifier) -> Classifier:
    for module in model.modules():
        module.training = isinstance(module, nn.BatchNorm2d)
    return model


def varied_subject(**options: Any) -> checks.Subject:
    """Coloured images and a head that is centred among their features, so that all classes are predicted."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(3 * checks.WINDOW, 3, 1, 1, generator=generator).expand(-1, -1, 16, 16)
    images = 0.7 * images + 0.3 * torch.rand(images.shape, generator=generator)
    torch.manual_seed(0)
    classifier = Classifier(ResNet(8, 4, width=4), mean=0, std=1)
    with torch.no_grad():
        features = training(classifier.copy()).features(images)
        classifier.head.weight.mul_(3 / features.std())
        classifier.head.bias.copy_(-classifier.head.weight @ features.mean(0))
    options = {"window": checks.WINDOW, **options}
    return checks.Subject(lambda: ttac.adapt(classifier.eval(), "adacontrast", **options), images)


def naive_votes(query: Tensor, memory: list[tuple[Tensor, Tensor]], count: int) -> int:
    by_distance = sorted(memory, key=lambda row: 1 - float(F.cosine_similarity(query, row[0], dim=0)))
    return int(torch.stack([posterior for _, posterior in by_distance[:count]]).mean(0).argmax())


@pytest.mark.parametrize("epochs", [None, 2], ids=["one pass", "two passes"])
def test_steps_are_the_published_ones(epochs: int | None) -> None:
    rate, decay = 0.02, 1e-2
    subject = varied_subject(
        **PLAIN, neighbours=3, lr=rate, weight_decay=decay, ema=0.9, contrast_weight=0.5,
        diversity_weight=0.3, memory=5 * checks.WINDOW,
    )  # fmt: skip
    adapter = subject.make()
    method = method_of(adapter)
    online, slow = training(adapter.classifier.copy()), training(adapter.classifier.copy())
    windows = subject.batches()
    memory: list[tuple[Tensor, Tensor]] = []
    if epochs is None:
        for images in windows:
            adapter(images)
        walks = [(1.0, windows)]
    else:
        stream = [(images, torch.zeros(len(images), dtype=torch.long)) for images in windows]
        ttac.evaluate(adapter, stream, "N-M-SF", epochs=epochs)
        walks = [(0.5 * (1 + math.cos(math.pi * epoch / epochs)), windows) for epoch in range(epochs)]
        with torch.no_grad():
            for images in windows:
                features, logits = slow.features_and_logits(images)
                memory += list(zip(features, logits.softmax(1), strict=True))

    head = [value for name, value in online.named_parameters() if ".fc." in name]
    backbone = [value for name, value in online.named_parameters() if ".fc." not in name]
    groups = [{"params": backbone, "lr": rate}, {"params": head, "lr": 10 * rate}]
    online.requires_grad_(True)
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=decay, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    keys: list[tuple[Tensor, int]] = []
    limit = len(memory) or 5 * checks.WINDOW
    for factor, walk in walks:
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate * factor, 10 * rate * factor
        for images in walk:
            images = images[torch.randperm(len(images), generator=generator)]
            with torch.no_grad():
                queries = online.features(images)
                features, logits = slow.features_and_logits(images)
            memory = (memory + list(zip(features, logits.softmax(1), strict=True)))[-limit:]
            labels = [naive_votes(query, memory, 3) for query in queries]
            view = partial(strong_view, images, generator, flip=False, kind="own-range", operations=0)
            query, query_logits = online.features_and_logits(view())
            with torch.no_grad():
                key = slow.features(view())
            contrast = []
            for i, label in enumerate(labels):
                others = [vector for vector, other in keys if other != label]
                scores = torch.stack(
                    [F.cosine_similarity(query[i], vector, dim=0) / 0.07 for vector in [key[i], *others]]
                )
                contrast.append(-scores.log_softmax(0)[0])
            mean = query_logits.softmax(1).mean(0)
            loss = F.cross_entropy(query_logits, torch.tensor(labels)) + 0.5 * torch.stack(contrast).mean()
            loss = loss + 0.3 * (mean * mean.log()).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            keys += list(zip(key, labels, strict=True))
            with torch.no_grad():
                for behind, ahead in zip(slow.parameters(), online.parameters(), strict=True):
                    behind.copy_(0.9 * behind + 0.1 * ahead)
    assert len({label for _, label in keys}) > 2
    for ours, theirs in ((adapter.classifier, online), (method.slow, slow)):
        found = dict(ours.named_parameters())
        for name, value in theirs.named_parameters():
            torch.testing.assert_close(found[name], value, rtol=2e-3, atol=5e-5, msg=name)
    rows = sorted(method.voters["features"].tolist())
    torch.testing.assert_close(
        torch.tensor(rows), torch.tensor(sorted(F.normalize(row, dim=0).tolist() for row, _ in memory)),
        rtol=1e-2, atol=1e-3,
    )  # fmt: skip
    assert sorted(method.keys["labels"].tolist()) == sorted(label for _, label in keys[-len(method.keys) :])


def test_it_runs_under_its_protocols_alone() -> None:
    subject = checks.subject("adacontrast", **PLAIN)
    stream = [(images, torch.arange(len(images)) % 4) for images in subject.batches()]
    assert ttac.evaluate(subject.make(), stream, "N-O-SF").counters["steps"] == 5
    assert ttac.evaluate(subject.make(), stream, "N-M-SF", epochs=2).counters["steps"] == 11
    with pytest.raises(ProtocolError, match="AdaContrast is not defined under N-O-SL"):
        ttac.evaluate(subject.make(), stream, "N-O-SL")


def test_what_is_predicted_is_the_image_itself() -> None:
    subject = checks.subject("adacontrast", queue=0, passes=1)
    adapter = subject.make()
    assert adapter.options.flip
    assert adapter.options.crop
    for images in subject.batches()[:3]:
        logits = adapter(images)
        model = adapter.classifier.copy().eval()
        torch.testing.assert_close(logits, model(images).detach(), rtol=1e-4, atol=1e-5)
        assert float((logits - model(images.flip(-1)).detach()).abs().max()) > 1e-3
    with pytest.raises(ValueError, match="predict must be before or after"):  # an update has logits of weak views
        checks.subject("adacontrast", predict="during")


def test_a_sample_votes_once_however_often_the_queue_is_walked() -> None:
    options = {**PLAIN, "queue": 2 * checks.WINDOW, "passes": 3, "memory": 100}
    subject = checks.subject("adacontrast", **options)
    adapter = subject.make()
    adapter(subject.images)
    assert len(method_of(adapter).voters) == 5 * checks.WINDOW
    assert len(method_of(adapter).keys) == 100
    small = checks.subject("adacontrast", **{**options, "memory": 2 * checks.WINDOW + 3}).make()
    small(subject.images[: 5 * checks.WINDOW])
    assert len(method_of(small).voters) == 2 * checks.WINDOW + 3
    assert len(small.memory_in_use.columns["number"].unique()) == 2 * checks.WINDOW


def test_the_target_set_fills_the_memory_and_sets_its_length() -> None:
    subject = checks.subject("adacontrast", **PLAIN)
    for memory, expected in ((100, 40), (20, 20)):
        adapter = checks.subject("adacontrast", **PLAIN, memory=memory).make()
        adapter.begin_epoch(0, 2, subject.batches(7))  # 44 samples in five windows, and four that are left
        assert len(method_of(adapter).voters) == method_of(adapter).voters.capacity == expected
        other = checks.subject("adacontrast", **PLAIN, memory=memory).make()
        other.load_state_dict(copy.deepcopy(adapter.state_dict()))
        for each in (adapter, other):
            each.learn(subject.images)
            assert len(method_of(each).voters) == expected
        assert checks._same(adapter.state_dict(), other.state_dict())
        adapter.reset()
        assert len(method_of(adapter).voters) == 0
        assert method_of(adapter).voters.capacity == memory


def test_a_refused_step_leaves_no_trace() -> None:
    subject = checks.subject("adacontrast", queue=0, passes=1)
    adapter = subject.make()
    first, second, third, *_ = subject.batches()
    adapter(first)
    before = adapter.state_dict()
    hook = adapter.classifier.model.conv1.register_forward_hook(lambda _module, _inputs, output: output * torch.inf)
    adapter(second)
    hook.remove()
    after = adapter.state_dict()
    assert adapter.counters()["skipped_steps"] == 1
    assert checks._same(before["classifier"], after["classifier"])
    assert checks._same(before["state"]["method"], after["state"]["method"])
    # The refused window takes the slots of the first: none of its samples has a row among the voters.
    assert adapter.memory_in_use.columns["number"].tolist() == [-1] * checks.WINDOW
    assert bool(adapter(third).isfinite().all())


def test_half_precision_weights_are_followed() -> None:
    torch.manual_seed(0)
    classifier = Classifier(ResNet(8, 4, width=4), mean=0, std=1).eval().bfloat16()
    subject = checks.subject("adacontrast", classifier, **PLAIN, lr=0.05)
    adapter = subject.make()
    slow = method_of(adapter).slow
    start = slow.head.weight.clone()
    assert bool(adapter(subject.images).isfinite().all())
    assert slow.head.weight.dtype == torch.float32
    assert not torch.equal(slow.head.weight, start)


def test_a_linear_head_alone_learns_too() -> None:
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4)), mean=0, std=1)
    adapter = ttac.adapt(classifier, "adacontrast", window=4, memory=8)
    assert adapter(torch.rand(9, 3, 8, 8)).shape == (9, 4)
    assert not torch.equal(adapter.classifier.head.weight, classifier.head.weight)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory", 10), ("neighbours", 0), ("temperature", 0.0), ("ema", 1.1), ("head_rate", 0.0),
        ("weight_decay", -1.0), ("diversity_weight", -1.0), ("operations", -1), ("magnitude", -1),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        AdaContrast.options_type(**{name: value})


def test_a_ring_overwrites_rows_that_it_holds() -> None:
    ring = Ring(4, values=torch.zeros(()))
    ring.write(ring.next(3), values=torch.tensor([0.0, 1.0, 2.0]))
    ring.write(torch.tensor([1, 3, 4]), values=torch.tensor([10.0, 3.0, 4.0]))
    assert ring["values"].tolist() == [4.0, 10.0, 2.0, 3.0]
    assert ring.written == 5
