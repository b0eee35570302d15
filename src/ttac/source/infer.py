"""Source-free anchors: class means from the head's weights alone."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ttac.classifier import Classifier
from ttac.gaussian import Full, Gaussians, Isotropic
from ttac.heads import HeadError, evaluating, probe_images

Parameterisation = Literal["absolute", "square", "signed"]

GAMMA_DIVISOR = 30.0  # gamma = largest singular value of Cov_k(mu_k) / 30
WEIGHT_DECAY = 1e-3
TOLERANCE = 1e-5  # largest projected gradient left; the penalty's own gradient is about 1e-3
MAX_STEPS = 20_000


def infer_means(weight: Tensor, bias: Tensor | None, parameterisation: Parameterisation) -> Tensor:
    """Find the means that the head classifies as their own class: `weight [K, D] -> [K, D]`.

    Each minimises `CE(h(mu_k), k) + wd/2 |m_k|^2`. What `m` is makes the penalty on mu: `mu = |m|` (the authors' code)
    shrinks all features alike, `mu = m^2` (the paper's text) is a lasso and leaves a few features alone, and `mu = m`
    is for features that can be negative. All three are convex in mu, so the solution does not depend on the solver:
    this is accelerated projected gradient with restarts where the authors ran 10,000 steps of RMSprop.

    >>> infer_means(torch.eye(3), None, "absolute").argmax(1)
    tensor([0, 1, 2])
    """
    weight = weight.detach().double()
    bias = weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
    identity = torch.eye(len(weight)).to(weight)
    # The softmax's curvature is at most 1/2 in the logits.
    rate = 1 / (0.5 * torch.linalg.matrix_norm(weight, 2).square() + WEIGHT_DECAY)

    def gradient(mean: Tensor) -> Tensor:
        penalty = WEIGHT_DECAY / 2 if parameterisation == "square" else WEIGHT_DECAY * mean
        return (torch.softmax(mean @ weight.mT + bias, 1) - identity) @ weight + penalty

    def project(mean: Tensor) -> Tensor:
        return mean if parameterisation == "signed" else mean.clamp_min(0)

    mean = lead = torch.zeros_like(weight)
    inertia = 1.0
    for _ in range(MAX_STEPS):
        following = project(lead - rate * gradient(lead))
        step = following - mean
        if float((following - lead).abs().max()) <= TOLERANCE * rate:
            break
        if bool(((lead - following) * step).sum() > 0):  # overshoot: start the acceleration anew
            inertia = 1.0
        faster = (1 + math.sqrt(1 + 4 * inertia**2)) / 2
        lead = following + (inertia - 1) / faster * step
        mean, inertia = following, faster
    if not bool(mean.isfinite().all()):
        raise ValueError("the head's weights give no finite class means; are they finite?")
    return mean


def anchors_around(means: Tensor) -> tuple[Gaussians, Gaussians]:
    """Put `gamma I` around each mean `[K, D]`, and match one Gaussian to the equally weighted mixture of them."""
    between = torch.cov(means.mT, correction=0).reshape(means.shape[1], means.shape[1])
    # The largest singular value of Cov_k(mu_k), from the K x K Gram matrix where K < D.
    centred = means - means.mean(0)
    gamma = torch.linalg.svdvals(centred)[0].square() / len(means) / GAMMA_DIVISOR
    classes = Gaussians(means, Isotropic(gamma.repeat(len(means)), torch.tensor(means.shape[1])))
    overall = Gaussians(means.mean(0, keepdim=True), Full(between[None]).plus(float(gamma)))
    return classes, overall


def has_signed_features(classifier: Classifier) -> bool:
    """Tell from a probe pass whether features can be negative (ViTs) or not (networks that end in a ReLU)."""
    try:
        images = probe_images(classifier.model).to(classifier.mean)
    except HeadError as error:
        raise ValueError(f"whether features can be negative is unknown; say parameterisation=... ({error})") from error
    with evaluating(classifier), torch.no_grad():
        return bool((classifier.features(images) < 0).any())
