"""TTT-R against the published step, written down naively, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ttac
from ttac import Classifier, checks
from ttac.evaluation.protocols import ProtocolError
from ttac.methods.ttt_r import TTTR
from ttac.model.branches import ContrastiveBranch, RotationBranch
from ttac.model.views import weak_view


def with_branch(classifier: Classifier) -> Classifier:
    torch.manual_seed(1)
    classifier.branch = RotationBranch(classifier.feature_dim)
    return classifier


@pytest.mark.parametrize(("copies", "varied"), [(1, False), (3, False), (3, True)])
def test_steps_are_the_published_ones(copies: int, varied: bool) -> None:
    subject = checks.subject("ttt-r", queue=0, passes=1, lr=0.1, copies=copies, flip=varied, crop=varied)
    adapter = subject.make()
    model = adapter.classifier.copy()
    adapter(subject.images[: 2 * checks.WINDOW])

    backbone = [value for name, value in model.named_parameters() if ".fc." not in name and "branch" not in name]
    optimizer = torch.optim.SGD([value.requires_grad_() for value in backbone], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        module.training = isinstance(module, nn.BatchNorm2d)
    for window in (window for window in subject.batches()[:2] for _ in range(copies)):
        images = window[torch.randperm(len(window), generator=generator)]
        turns = torch.randint(4, (len(images),), generator=generator)
        images = weak_view(images, generator, flip=varied, crop=varied)
        turned = torch.stack([image.rot90(int(turn), (1, 2)) for image, turn in zip(images, turns, strict=True)])
        assert model.branch is not None
        loss = F.cross_entropy(model.branch(model.features(turned)), turns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = dict(adapter.classifier.named_parameters())
    for name, value in model.named_parameters():
        torch.testing.assert_close(moved[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_an_image_has_as_many_copies_as_published() -> None:
    options = TTTR.options_type()
    assert (options.copies, options.flip, options.crop, options.lr, options.momentum) == (32, True, True, 1e-3, 0.0)
    subject = checks.subject("ttt-r", copies=32, queue=0, passes=1)
    adapter = subject.make()
    seen = []
    real = adapter.classifier.features_and_logits
    adapter.classifier.features_and_logits = lambda images: (seen.append(images), real(images))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    adapter(subject.images[: checks.WINDOW])
    assert adapter.counters()["steps"] == 32
    # One pass more: that of the upright images, which the stored statistics follow. A single image was tried before.
    assert [len(images) for images in seen] == [1, *33 * [checks.WINDOW]]
    assert len(torch.cat(seen).unique(dim=0)) > 25 * checks.WINDOW
    shared = checks.subject("ttt-r", copies=4, passes=2, queue=0, lr=None, rate=0.32).make()
    assert shared.method.rate() == pytest.approx(0.32 / 8**0.5)


def test_the_stored_statistics_are_of_upright_images() -> None:
    subject = checks.subject("ttt-r", queue=0, passes=1, copies=3, lr=1e-9)
    adapter = subject.make()
    images = subject.images[: checks.WINDOW]
    with torch.no_grad():
        inputs = adapter.classifier.model.conv1(images)
    adapter(images)
    assert adapter.norms.seen == checks.WINDOW
    torch.testing.assert_close(adapter.classifier.model.bn1.running_mean, inputs.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_predictions_during_the_update_are_of_upright_images() -> None:
    subject = checks.subject("ttt-r", queue=0, passes=1, copies=3, lr=1e-9, predict="during")
    adapter = subject.make()
    model = adapter.classifier.copy()
    images = subject.images[: checks.WINDOW]
    for module in model.modules():
        module.training = isinstance(module, nn.BatchNorm2d)
    torch.testing.assert_close(adapter(images), model(images).detach(), rtol=1e-4, atol=1e-5)


def test_it_runs_under_its_own_protocol_alone(tiny_classifier: Classifier) -> None:
    adapter = ttac.adapt(with_branch(tiny_classifier), "ttt-r", window=8, lr=0.05, copies=2)
    stream = [(torch.rand(12, 3, 8, 8), torch.arange(12) % 10) for _ in range(2)]
    for protocol in ("N-O-SF", "Y-O-SL", "N-M-SL"):
        with pytest.raises(ProtocolError, match=f"TTT-R is not defined under {protocol}; it runs under Y-M-SL"):
            ttac.evaluate(adapter, stream, protocol)
    record = ttac.evaluate(adapter, stream, "Y-M-SL", epochs=2)
    assert record.samples == 24
    assert record.provenance["knowledge"]["rotation branch"]["branch"] == "rotation branch"
    assert record.counters["steps"] == 12


def test_models_without_its_branch_are_refused(tiny_classifier: Classifier) -> None:
    with pytest.raises(ValueError, match="TTT-R with these options needs to know the rotation branch of the source"):
        ttac.adapt(tiny_classifier, "ttt-r")
    tiny_classifier.branch = ContrastiveBranch(tiny_classifier.feature_dim)
    with pytest.raises(ValueError, match=r"given contrastive branch: use a model trained with .* ce\+rotation"):
        ttac.adapt(tiny_classifier, "ttt-r")


def test_images_that_are_not_square_never_enter_the_queue(tiny_classifier: Classifier) -> None:
    adapter = ttac.adapt(with_branch(tiny_classifier), "ttt-r", window=4, copies=2)
    with pytest.raises(ValueError, match="takes square ones, not 8 x 12: crop them"):
        adapter(torch.rand(4, 3, 8, 12))
    assert adapter(torch.rand(4, 3, 8, 8)).shape == (4, 10)
