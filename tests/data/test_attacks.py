"""PGD against what is known of it: optima of linear models, a loop over samples, and the ball that it stays in."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from ttac import Classifier
from ttac.data.attacks import USUAL, Norm, PGDOptions, freeze, pgd

LINF, L2 = (PGDOptions(norm, *USUAL[norm]) for norm in ("linf", "l2"))


def random_images(count: int, low: int = 0, high: int = 256, side: int = 8) -> Tensor:
    """Draw uint8 images, of which the extremes occur often."""
    levels = torch.randint(low - 40, high + 40, (count, 3, side, side), generator=torch.Generator().manual_seed(0))
    return levels.clamp(low, high - 1).byte()


def linear(classes: int, seed: int = 0, scale: float = 1.0) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(192, classes)), mean=0, std=1)
    with torch.no_grad():
        classifier.head.weight.mul_(scale)
    return classifier


def start_of(images: Tensor, options: PGDOptions, index: Tensor) -> Tensor:
    """Give the random start, which is the result where all gradients are zero."""
    blind = linear(2, scale=0.0).to(images.dtype)
    return pgd(blind, images, torch.zeros(len(images)).long(), dataclasses.replace(options, steps=1), index)


@pytest.mark.parametrize("random_start", [True, False])
@pytest.mark.parametrize("options", [LINF, L2], ids=["linf", "l2"])
def test_a_linear_model_is_deceived_as_well_as_can_be(options: PGDOptions, random_start: bool) -> None:
    classifier, clean = linear(2), random_images(6, 60, 200).float() / 255
    labels = torch.arange(6) % 2
    options = dataclasses.replace(options, random_start=random_start, steps=100)
    weight = classifier.head.weight.detach()
    away = torch.stack([weight[1 - label] - weight[label] for label in labels.tolist()]).view_as(clean)
    if options.norm == "linf":
        best = options.eps * away.sign()
    else:
        best = options.eps * away / away.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    changed = pgd(classifier, clean, labels, options, torch.arange(6))
    torch.testing.assert_close(changed - clean, best, atol=1e-6, rtol=0)


def naive_pgd(classifier: Classifier, clean: Tensor, label: int, options: PGDOptions, start: Tensor) -> Tensor:
    """One image, value by value as the paper writes it."""
    now = start.clone()
    for _ in range(options.steps):
        now.requires_grad_()
        logits = classifier(now[None])[0]
        (torch.logsumexp(logits, 0) - logits[label]).backward()
        assert now.grad is not None
        gradient = now.grad.flatten().tolist()
        length = math.sqrt(sum(value**2 for value in gradient))
        moved, offsets = now.detach().flatten().tolist(), []
        for place, value in enumerate(gradient):
            if options.norm == "linf":
                offset = moved[place] + options.step * ((value > 0) - (value < 0)) - clean.flatten()[place].item()
                offsets.append(max(-options.eps, min(options.eps, offset)))
            else:
                offsets.append(moved[place] + options.step * value / length - clean.flatten()[place].item())
        far = math.sqrt(sum(value**2 for value in offsets))
        if options.norm == "l2" and far > options.eps:
            offsets = [value * options.eps / far for value in offsets]
        values = [
            max(0.0, min(1.0, start + offset)) for start, offset in zip(clean.flatten().tolist(), offsets, strict=True)
        ]
        now = torch.tensor(values, dtype=clean.dtype).view_as(clean)
    return now


@pytest.mark.parametrize("random_start", [True, False])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_batch_is_what_a_loop_over_its_samples_gives(
    norm: Norm, random_start: bool, tiny_classifier: Classifier
) -> None:
    classifier = tiny_classifier.double()
    eps, step = USUAL[norm]
    options = PGDOptions(norm, eps, step, steps=4, random_start=random_start, seed=3)
    clean, labels, index = random_images(3).double() / 255, torch.tensor([1, 0, 9]), torch.tensor([7, 0, 4])
    start = start_of(clean, options, index) if random_start else clean
    expected = [
        naive_pgd(classifier, *sample, options, at) for *sample, at in zip(clean, labels.tolist(), start, strict=True)
    ]
    torch.testing.assert_close(pgd(classifier, clean, labels, options, index), torch.stack(expected))


def test_the_start_in_linf_is_uniform_in_the_cube() -> None:
    clean = torch.full((200, 3, 8, 8), 0.5)
    offset = (start_of(clean, LINF, torch.arange(200)) - clean) / LINF.eps
    assert stats.kstest(offset.flatten().numpy(), stats.uniform(-1, 2).cdf).pvalue > 0.01
    assert stats.kstest(offset[:, 1, 2, 3].numpy(), stats.uniform(-1, 2).cdf).pvalue > 0.01


def test_the_start_in_l2_is_uniform_in_the_ball() -> None:
    clean = torch.full((500, 3, 8, 8), 0.5, dtype=torch.float64)
    offset = ((start_of(clean, L2, torch.arange(500)) - clean) / L2.eps).flatten(1)
    length = offset.norm(dim=1)
    assert stats.kstest((length**192).numpy(), "uniform").pvalue > 0.01
    # (1 + one coordinate of a uniform direction in d dimensions) / 2 is Beta((d - 1) / 2, (d - 1) / 2).
    for place in (0, 100):
        share = (1 + offset[:, place] / length) / 2
        assert stats.kstest(share.numpy(), stats.beta(95.5, 95.5).cdf).pvalue > 0.01


@pytest.mark.parametrize("options", [LINF, L2], ids=["linf", "l2"])
def test_the_start_is_that_of_the_seed_and_the_sample(options: PGDOptions) -> None:
    clean, index = torch.full((3, 3, 8, 8), 0.5), torch.tensor([4, 8, 15])
    starts = start_of(clean, options, index)
    assert torch.equal(starts[[2, 0]], start_of(clean[:2], options, index[[2, 0]]))
    other_seed = start_of(clean, dataclasses.replace(options, seed=1), index)
    assert not torch.isclose(starts, other_seed, atol=1e-6).all()
    assert not torch.isclose(starts[0], starts[1], atol=1e-6).all()


@pytest.mark.parametrize("options", [LINF, L2], ids=["linf", "l2"])
def test_batches_do_not_matter(options: PGDOptions, tiny_classifier: Classifier) -> None:
    classifier = tiny_classifier.double()
    options = dataclasses.replace(options, steps=5)
    clean, labels, index = random_images(7), torch.arange(7), torch.arange(7) + 100

    def attack(rows: Tensor) -> Tensor:
        changed = pgd(classifier, clean[rows].double() / 255, labels[rows], options, index[rows])
        return freeze(changed, clean[rows], options)

    whole = attack(torch.arange(7))
    for size in (1, 3):
        assert torch.equal(torch.cat([attack(rows) for rows in torch.arange(7).split(size)]), whole)
    assert torch.equal(attack(torch.arange(7).flip(0)).flip(0), whole)


@pytest.mark.parametrize("eps", [8 / 255, 2.5 / 255, 1 / 255, 0.3])
def test_frozen_images_are_in_the_cube(eps: float, tiny_classifier: Classifier) -> None:
    options, clean = PGDOptions("linf", eps, eps / 3, steps=6), random_images(8)
    changed = pgd(tiny_classifier, clean.float() / 255, torch.arange(8), options, torch.arange(8))
    assert 0 <= float(changed.min()) <= float(changed.max()) <= 1
    assert float((changed - clean / 255).abs().max()) <= eps + 1e-6
    moved = freeze(changed, clean, options).int() - clean.int()
    assert int(moved.abs().max()) == math.floor(round(255 * eps, 6))


@pytest.mark.parametrize("eps", [0.5, 0.1, 2.0])
def test_frozen_images_are_in_the_ball(eps: float, tiny_classifier: Classifier) -> None:
    options, clean = PGDOptions("l2", eps, eps / 4, steps=8), random_images(8)
    changed = pgd(tiny_classifier, clean.float() / 255, torch.arange(8), options, torch.arange(8))
    assert 0 <= float(changed.min()) <= float(changed.max()) <= 1
    lengths = (changed.double() - clean.double() / 255).flatten(1).norm(dim=1)
    assert 0.95 * eps < float(lengths.max()) <= eps * (1 + 1e-6)
    moved = (freeze(changed, clean, options).double() - clean.double()).flatten(1)
    assert bool((moved.norm(dim=1) / 255 <= eps).all())
    assert float(moved.norm(dim=1).max()) / 255 > 0.95 * eps
    asked = (255 * changed.double() - clean).flatten(1)
    assert bool(((moved - asked).abs() < 1 + 1e-4).all())
    assert bool((moved * asked >= 0).all())


@pytest.mark.parametrize(("side", "kept"), [(32, 0.95), (224, 0.6)])
@pytest.mark.parametrize("eps", [0.5, 0.2, 3.0])
def test_freezing_in_l2_uses_the_ball_and_keeps_the_direction(side: int, kept: float, eps: float) -> None:
    random = torch.Generator().manual_seed(2)
    clean = torch.randint(40, 216, (3, 3, side, side), generator=random).byte()
    direction = torch.randn(clean.shape, generator=random)
    asked = eps * direction / direction.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    frozen = freeze(clean / 255 + asked, clean, PGDOptions("l2", eps, 0.1))
    moved = (frozen.double() - clean.double()).flatten(1)
    length = moved.norm(dim=1) / 255
    assert bool((length <= eps).all())
    assert bool((length > 0.98 * eps).all())
    if eps >= 0.5:
        assert bool((F.cosine_similarity(moved, asked.double().flatten(1)) > kept).all())


def test_freezing_in_l2_raises_what_lost_most_as_far_as_the_ball_goes() -> None:
    random = torch.Generator().manual_seed(3)
    clean = random_images(20, side=4)
    for eps in (1 / 255, 3 / 255, 0.03, 0.1, 0.4):
        asked = torch.randn(clean.shape, generator=random, dtype=torch.float64).mul(eps / 5)
        changed = (clean.double() / 255 + asked).clamp(0, 1)
        frozen = freeze(changed, clean, PGDOptions("l2", eps, 0.1))
        for image, centre, result in zip(changed.flatten(1), clean.flatten(1), frozen.flatten(1), strict=True):
            np.testing.assert_array_equal(result.numpy(), naive_freeze_in_l2(image.tolist(), centre.tolist(), eps))


def naive_freeze_in_l2(changed: list[float], clean: list[int], eps: float) -> list[int]:
    """One image, value by value."""
    moved = [255 * value - centre for value, centre in zip(changed, clean, strict=True)]
    far = math.sqrt(sum(value**2 for value in moved))
    sizes = [abs(value) * min(1, 255 * eps / far) for value in moved]
    levels = [int(size) for size in sizes]
    for place in sorted(range(len(sizes)), key=lambda place: levels[place] - sizes[place]):
        raised = sum(level**2 for level in levels) + 2 * levels[place] + 1
        if math.sqrt(raised) / 255 > eps or sizes[place] - levels[place] < 1e-3:
            break
        levels[place] += 1
    return [centre + (level if move > 0 else -level) for centre, level, move in zip(clean, levels, moved, strict=True)]


def test_freezing_in_l2_leaves_equal_images_and_draws_far_ones_in() -> None:
    clean = torch.arange(256).byte().view(2, 2, 8, 8)
    assert torch.equal(freeze(clean.float() / 255, clean, L2), clean)  # in single precision 255 (k / 255) is not k
    assert freeze(clean[:0].float() / 255, clean[:0], L2).shape == (0, 2, 8, 8)
    far = freeze(torch.ones(2, 2, 8, 8), clean, L2).double() - clean.double()
    length = far.flatten(1).norm(dim=1) / 255
    assert bool(((0.98 * L2.eps < length) & (length <= L2.eps)).all())
    assert float(far.min()) >= 0


def test_rounding_takes_the_nearest_level_in_reach() -> None:
    random = torch.Generator().manual_seed(1)
    clean = random_images(1).flatten()
    for eps in (8 / 255, 2.5 / 255):
        changed = (clean / 255 + eps * (2 * torch.rand(len(clean), generator=random) - 1)).clamp(0, 1)
        frozen = freeze(changed, clean, PGDOptions("linf", eps, 0.01))
        for value, centre, level in zip(changed.tolist(), clean.tolist(), frozen.tolist(), strict=True):
            reach = [other for other in range(256) if abs(other - centre) <= 255 * eps + 1e-6]
            assert level in reach
            assert abs(level - 255 * value) <= min(abs(other - 255 * value) for other in reach) + 1e-4


@pytest.mark.parametrize("options", [LINF, L2], ids=["linf", "l2"])
def test_more_steps_are_not_weaker(options: PGDOptions, tiny_classifier: Classifier) -> None:
    clean = random_images(32).float() / 255
    labels = tiny_classifier(clean).argmax(1)

    @torch.no_grad()
    def loss(images: Tensor) -> float:
        return float(F.cross_entropy(tiny_classifier(images), labels))

    losses = [loss(clean)]
    for steps in (1, 4, 16):
        small = dataclasses.replace(options, steps=steps, step=options.eps / 8)
        losses.append(loss(pgd(tiny_classifier, clean, labels, small, torch.arange(32))))
    assert losses == sorted(losses)
    assert losses[-1] > losses[0] + 0.01


def test_a_confident_models_tiny_gradients_count_in_l2() -> None:
    classifier, clean = linear(2, scale=60.0), torch.full((1, 3, 8, 8), 0.5)
    label = classifier(clean).argmax(1)
    with torch.no_grad():
        classifier.head.bias[label] += 60  # a gradient of about 1e-26, whose square is zero
    changed = pgd(classifier, clean, label, dataclasses.replace(L2, random_start=False), torch.tensor([0]))
    assert float((changed - clean).norm()) == pytest.approx(L2.eps, rel=1e-5)


def test_nothing_of_the_model_changes() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 4)
        classifier = Classifier(nn.Sequential(*layers), head="4", mean=0, std=1)
    classifier.model[1].eval()
    clean, labels, index = random_images(4).float() / 255, torch.arange(4), torch.arange(4)
    before, modes = classifier.fingerprint(), [module.training for module in classifier.modules()]
    assert modes.count(False) == 1
    state = torch.get_rng_state()
    with torch.no_grad():
        changed = pgd(classifier, clean, labels, LINF, index)
    assert torch.equal(changed, pgd(classifier.copy().eval(), clean, labels, LINF, index))
    assert torch.equal(torch.get_rng_state(), state)
    assert classifier.fingerprint() == before
    assert [module.training for module in classifier.modules()] == modes
    assert all(value.grad is None and value.requires_grad for value in classifier.parameters())
    assert not changed.requires_grad


def test_an_overflowing_model_leaves_images_where_they_are() -> None:
    classifier, clean = linear(2, scale=1e38), random_images(2).float() / 255
    start = start_of(clean, LINF, torch.arange(2))
    with torch.no_grad():
        classifier.head.weight.fill_(3e38)
    assert torch.equal(pgd(classifier, clean, torch.tensor([0, 1]), LINF, torch.arange(2)), start)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "l1"}, "norm"),
        ({"eps": 0.0}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"step": -0.1}, "step"),
        ({"step": math.inf}, "step"),
        ({"steps": 0}, "steps"),
        ({"eps": 8.0}, r"eps is of pixels in \[0, 1\], not 8: did you mean 8/255\?"),
        ({"seed": -1}, "seed"),
        ({"seed": 10**26}, "seed"),
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LINF, **change)


def test_wrong_input_is_refused() -> None:
    classifier, clean = linear(2), torch.full((2, 3, 8, 8), 0.5)
    with pytest.raises(TypeError, match=r"use images\.float"):
        pgd(classifier, (255 * clean).byte(), torch.tensor([0, 1]), LINF, torch.arange(2))
    with pytest.raises(ValueError, match=r"labels must be in 0..1; got 0..2"):
        pgd(classifier, clean, torch.tensor([0, 2]), LINF, torch.arange(2))
