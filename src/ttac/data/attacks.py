"""Projected gradient descent: images changed as little as allowed so that a model takes them for something else.

Madry et al., "Towards Deep Learning Models Resistant to Adversarial Attacks", ICLR 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.common.options import Checked, setting
from ttac.data.corruptions.draws import SEEDS, Draws
from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating
from ttac.model.inputs import check_labels

Norm = Literal["linf", "l2"]
# eps and step: those of the paper's adversarial target, and the radius of the usual CIFAR benchmarks in L2 with a fifth
# of it a step. Both are of pixels in [0, 1], the L2 norm over all values of an image.
USUAL: dict[Norm, tuple[float, float]] = {"linf": (8 / 255, 0.01), "l2": (0.5, 0.1)}
_SLACK = 1e-4  # levels, more than single precision errs by


@dataclass(frozen=True)
class PGDOptions(Checked):
    """How far an image may be changed, and how it is done.

    >>> PGDOptions("linf", *USUAL["linf"]).steps
    40
    """

    norm: Norm
    eps: float = setting(help="radius of the ball, pixels in [0, 1]", above=0)
    step: float = setting(help="length of a step", above=0)
    steps: int = setting(40, "of the descent", least=1)
    random_start: bool = setting(True, "whether it starts anywhere in the ball")
    seed: int = setting(0, "of the start", least=0, below=SEEDS)

    def check(self) -> None:
        """Refuse a radius of 8-bit levels."""
        if self.norm == "linf" and self.eps > 1:
            raise ValueError(f"eps is of pixels in [0, 1], not {self.eps:g}: did you mean {self.eps:g}/255?")


def pgd(classifier: Classifier, images: Tensor, labels: Tensor, options: PGDOptions, index: Tensor) -> Tensor:
    """Change images `[N, C, H, W]` in [0, 1] so that the cross-entropy with their true `labels [N]` rises.

    `x' = P(x + step * g)`, with `g` the gradient's sign (linf) or the gradient at length 1 (l2), and `P` the projection
    to the ball around the clean image and to [0, 1]. The start depends on the seed and on `index [N]` alone, the places
    of the images in their data set. The model runs in eval mode, and nothing of it changes.

    >>> classifier = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)), mean=0, std=1)
    >>> clean = torch.full((1, 3, 2, 2), 0.5)
    >>> changed = pgd(classifier, clean, torch.tensor([0]), PGDOptions("linf", 0.1, 0.05), torch.tensor([0]))
    >>> torch.equal((changed - clean).abs().round(decimals=4), torch.full_like(clean, 0.1))
    True
    """
    clean = classifier.check(images)
    labels = check_labels(labels, len(clean), classifier.num_classes).to(clean.device)
    changed = _start(clean, options, index) if options.random_start else clean
    with evaluating(classifier), torch.enable_grad():
        for _ in range(options.steps):
            gradient = _gradient(classifier, changed, labels)
            changed = _project(changed + options.step * _direction(gradient, options.norm), clean, options)
    return changed


def freeze(changed: Tensor, clean: Tensor, options: PGDOptions) -> Tensor:
    """Round changed images in [0, 1] to uint8 levels that are in the ball around the `clean` uint8 images still.

    In linf that is the nearest level in reach. In l2 each value of an image of `[N, ...]` is rounded towards the clean
    one, and then those that lost most are moved a level further, as many as the ball has room for.

    >>> clean, options = torch.tensor([100, 100], dtype=torch.uint8), PGDOptions("linf", 2.5 / 255, 0.01)
    >>> freeze(torch.tensor([101.6, 97.5]) / 255, clean, options)
    tensor([102,  98], dtype=torch.uint8)
    """
    if options.norm == "l2":
        return _freeze_in_l2(changed, clean, 255 * options.eps)
    centre, reach = clean.to(changed), math.floor(255 * options.eps + _SLACK)
    return (255 * changed).round().clamp(centre - reach, centre + reach).byte()


def _freeze_in_l2(changed: Tensor, clean: Tensor, radius: float) -> Tensor:
    """Round to levels in the ball of a radius in levels.

    Rounding to the nearest would leave nothing of a change that is spread over many values, each under half a level.

    >>> changed, clean = torch.tensor([[101.6, 98.3, 100.4]]) / 255, torch.full((1, 3), 100).byte()
    >>> _freeze_in_l2(changed, clean, 2.3)  # 1² + 2² is within 2.3²
    tensor([[101,  98, 100]], dtype=torch.uint8)
    """
    moved = (255 * changed.double().clamp(0, 1) - clean).flatten(1)
    size = (moved.abs() - _SLACK).clamp_(min=0)
    inside = radius * (1 - 1e-9)  # so that no rounding in double precision puts whole levels outside
    size *= inside / size.norm(dim=1, keepdim=True).clamp(min=inside)
    whole = size.floor()
    lost, order = (size - whole).sort(dim=1, descending=True, stable=True)
    room = math.floor(radius**2) - whole.square().sum(1, keepdim=True)
    # From k to k + 1 levels, the square of the norm grows by 2k + 1. What did not move, or by whole levels, stays.
    cost = (2 * whole.gather(1, order) + 1).cumsum(1)
    whole.scatter_add_(1, order, ((cost <= room) & (lost > 0)).to(whole))
    return (clean + (moved.sign() * whole).view_as(clean)).byte()


def _start(clean: Tensor, options: PGDOptions, index: Tensor) -> Tensor:
    """Draw from the uniform distribution in the ball."""
    draws = Draws(options.seed, f"pgd {options.norm}", index, clean.device)
    shape = clean.shape[1:]
    if options.norm == "linf":
        offset = 2 * draws.uniform(*shape) - 1
    else:
        # The direction of normal numbers is uniform; the share of a ball within the radius r is r ** dimensions.
        radius = draws.uniform(1, 1, 1).double() ** (1 / math.prod(shape))
        offset = _direction(draws.normal(*shape), "l2") * radius
    return _project(clean + options.eps * offset.to(clean), clean, options)


def _gradient(classifier: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    images = images.detach().requires_grad_()
    # The sum, so that the gradient of an image does not depend on how many others there are.
    loss = F.cross_entropy(classifier(images).float(), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, images)  # of the images alone: no parameter gets one
    return gradient.nan_to_num()  # an image whose loss overflows stays where it is


def _direction(gradient: Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return gradient.sign()
    tiny = torch.finfo(gradient.dtype).tiny
    # Scaled first: the squares of a confident model's gradients are zero in single precision.
    gradient = gradient / gradient.abs().amax((1, 2, 3), keepdim=True).clamp(min=tiny)
    return gradient / gradient.square().sum((1, 2, 3), keepdim=True).sqrt().clamp(min=tiny)


def _project(changed: Tensor, clean: Tensor, options: PGDOptions) -> Tensor:
    """Take the nearest point of the ball, and of it the nearest in [0, 1], which is no farther from the clean image."""
    if options.norm == "linf":
        return changed.clamp(clean - options.eps, clean + options.eps).clamp(0, 1)
    offset = changed - clean
    length = offset.square().sum((1, 2, 3), keepdim=True).sqrt()
    return (clean + offset * (options.eps / length.clamp(min=options.eps))).clamp(0, 1)
