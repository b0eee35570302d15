"""Source-free anchors: class means from the head's weights alone."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ttac.gaussian import Full, Gaussians, Isotropic
from ttac.model.classifier import Classifier
from ttac.model.heads import HeadError, evaluating, probe_images

Parameterisation = Literal["absolute", "square", "signed"]

GAMMA_DIVISOR = 30.0  # gamma = largest singular value of Cov_k(mu_k) / 30
WEIGHT_DECAY = 1e-3
TOLERANCE = 1e-4  # projected gradient left, relative to the penalty's: under a quadratic one the relative error at most
ROUND = 10  # steps between the rounds that compute logits anew and leave solved classes out
ROUNDS = 100
PATIENCE = 20  # times as many rounds in float64 for classes that float32 did not solve
MAX_HALVINGS = 40
SUFFICIENT = 1e-4  # share of the decrease promised by the slope that a step has to reach
BLOCK = 128  # classes at a time: what belongs to them stays in the cache, and memory is bounded whatever K is


def infer_means(weight: Tensor, bias: Tensor | None, parameterisation: Parameterisation) -> Tensor:
    """Find the means that the head classifies as their own class: `weight [K, D] -> [K, D]`.

    Each minimises `CE(h(mu_k), k) + wd/2 |m_k|^2`. What `m` is makes the penalty on mu: `mu = |m|` (the authors' code)
    shrinks all features alike, `mu = m^2` (the paper's text) is a lasso and leaves a few features alone, and `mu = m`
    is for features that can be negative. All three are convex in mu, so that no solver finds less: this is projected
    gradient with the rates of Barzilai and Borwein where the authors ran 10,000 steps of RMSprop. Classes that it does
    not solve in float32 are solved in float64, and it warns of those that stay unsolved.

    >>> infer_means(torch.eye(3), None, "absolute").argmax(1)
    tensor([0, 1, 2])
    """
    weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    bias = weight.new_zeros(len(weight)) if bias is None else bias.detach().to(weight)
    if not bool(weight.isfinite().all() & bias.isfinite().all()):
        raise ValueError("the head's weights give no finite class means; are they finite?")
    means, unsolved = torch.zeros_like(weight), torch.ones_like(bias, dtype=torch.bool)
    for dtype, rounds in ((weight.dtype, ROUNDS), (torch.float64, PATIENCE * ROUNDS)):
        for labels in unsolved.nonzero().flatten().split(BLOCK):
            problem = _Problem(weight.to(dtype), bias.to(dtype), labels, parameterisation)
            found, unsolved[labels] = _minimise(problem, means[labels].to(dtype), rounds)
            means[labels] = found.to(means)
    if bool(unsolved.any()):
        warnings.warn(
            f"the means of {int(unsolved.sum())} of {len(weight)} classes are not the best ones: the solver gave up; "
            "collect the statistics instead if there are source samples",
            stacklevel=2,
        )
    return means


@dataclass(frozen=True, eq=False)
class _Problem:
    """The objectives of the classes `labels [n]`, which do not depend on each other."""

    weight: Tensor  # [K, D]
    bias: Tensor  # [K]
    labels: Tensor  # [n]
    parameterisation: Parameterisation

    def logits(self, mean: Tensor) -> Tensor:
        """Compute the head's output for the means `[n, D]`: `[n, K]`."""
        return torch.addmm(self.bias, mean, self.weight.mT)

    def fit(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cross-entropy `[n]` and its gradient in the logits, softmax - one-hot `[n, K]`.

        Both go by how far the others are ahead, `a = logsumexp_others - z_k`, as `softplus(a)` and, for the own class,
        `-sigmoid(a)`: neither loses its digits or becomes infinite, however sure or wrong the head is.
        """
        own = self.labels[:, None]
        others = logits.scatter(1, own, -torch.inf)
        # A single class has no others.
        level = others.logsumexp(1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
        ahead = level - logits.gather(1, own)
        residual = others.sub_(level - F.logsigmoid(ahead)).exp_().scatter_(1, own, -ahead.sigmoid())
        return F.softplus(ahead).squeeze(1), residual

    def penalty(self, mean: Tensor, way: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give the coefficients `[n]` of the penalty of `mean + f way`, a parabola in f."""
        if self.parameterisation == "square":
            return WEIGHT_DECAY / 2 * mean.sum(1), WEIGHT_DECAY / 2 * way.sum(1), mean.new_zeros(len(mean))
        square, product = mean.square().sum(1), (mean * way).sum(1)
        return WEIGHT_DECAY / 2 * square, WEIGHT_DECAY * product, WEIGHT_DECAY / 2 * way.square().sum(1)

    def gradient(self, mean: Tensor, residual: Tensor) -> Tensor:
        """Compute the gradient in the means: `[n, D]`."""
        fit = residual @ self.weight
        return fit.add_(WEIGHT_DECAY / 2) if self.parameterisation == "square" else fit.add_(mean, alpha=WEIGHT_DECAY)

    def project(self, mean: Tensor) -> Tensor:
        """Move to the nearest allowed means, in place."""
        return mean if self.parameterisation == "signed" else mean.clamp_min_(0)

    def rates(self) -> tuple[float, float]:
        """Give a rate that is safe everywhere, and the highest that can be of use.

        The curvature is `Var_p(w v)` in a direction v, at most the largest |w|^2, plus the quadratic penalty's. A lasso
        has none of its own: there it is about `p w^2` with `p w` as large as the penalty's slope.
        """
        largest = float(self.weight.square().sum(1).max())
        lowest = WEIGHT_DECAY
        if self.parameterisation == "square":
            lowest *= 0.01 * min(1.0, float(self.weight.abs().max()))
        safe = 1 / (largest + WEIGHT_DECAY)
        return safe, max(1 / lowest, safe) if lowest else safe

    def unsolved(self, mean: Tensor, logits: Tensor, residual: Tensor, gradient: Tensor) -> Tensor:
        """Tell where more is left of the gradient than what pushes features out of the allowed means: `[n]`."""
        left = gradient if self.parameterisation == "signed" else gradient.clamp_max(0).where(mean <= 0, gradient)
        pull = (mean > 0) * (WEIGHT_DECAY / 2) if self.parameterisation == "square" else WEIGHT_DECAY * mean
        # Residuals, and with them the gradient, are as exact as the last place of the logits.
        place = torch.finfo(mean.dtype).eps * logits.abs().amax(1).clamp_min(1)
        rounding = place * (residual.abs() @ self.weight.norm(dim=1))
        return left.norm(dim=1) > TOLERANCE * pull.norm(dim=1) + rounding


def _minimise(problem: _Problem, start: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Solve by projected gradient from `start [n, D]`: means `[n, D]`, and which are still unsolved `[n]`."""
    means, left = start.clone(), torch.arange(len(start), device=start.device)
    safe, _ = problem.rates()
    rate = start.new_full((len(start),), safe)
    for _ in range(rounds):
        mean = means[left]
        logits = problem.logits(mean)
        _, residual = problem.fit(logits)
        unsolved = problem.unsolved(mean, logits, residual, problem.gradient(mean, residual))
        if not bool(unsolved.any()):
            return means, torch.zeros_like(means[:, 0], dtype=torch.bool)
        left, rate = left[unsolved], rate[unsolved]
        problem = replace(problem, labels=problem.labels[unsolved])
        means[left], rate = _descend(problem, mean[unsolved], logits[unsolved], rate)
    return means, torch.zeros_like(means[:, 0], dtype=torch.bool).index_fill_(0, left, True)


def _descend(problem: _Problem, mean: Tensor, logits: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Take one round of steps, each class with its own rate and line search: means `[n, D]` and rates `[n]`."""
    safe, highest = problem.rates()
    _, residual = problem.fit(logits)
    gradient = problem.gradient(mean, residual)
    for number in range(ROUND):
        way = problem.project(mean - rate[:, None] * gradient).sub_(mean)
        fraction, logits, residual = _search(problem, mean, way, logits, residual, (gradient * way).sum(1))
        step = way.mul_(fraction[:, None])
        mean = mean + step
        previous, gradient = gradient, problem.gradient(mean, residual)
        # Features that stay at zero have no part in the curvature along the step.
        change = (gradient - previous).mul_(step != 0)
        product = (step * change).sum(1)
        long, short = (step.square().sum(1), product), (product, change.square().sum(1))
        over, under = short if number % 2 else long
        # No curvature was met on a way that was flat; where there was no step at all, only a shorter one can help.
        flat = torch.where(fraction > 0, highest, safe)
        rate = torch.where((over > 0) & (under > 0), over / under, flat).clamp(safe, highest)
    return mean, rate


def _search(
    problem: _Problem, mean: Tensor, way: Tensor, logits: Tensor, residual: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Halve the fraction of `way` until the loss falls, 0 where it does not: fraction `[n]`, logits, residual `[n, K]`.

    Logits are linear in the mean, so that another fraction costs a softmax and no product with the weights.
    """
    logits_way = way @ problem.weight.mT
    constant, linear, quadratic = problem.penalty(mean, way)
    loss = problem.fit(logits)[0] + constant
    highest = loss * (1 + 8 * torch.finfo(loss.dtype).eps)  # for rounding
    fraction = torch.ones_like(loss)
    for _ in range(MAX_HALVINGS):
        tried = torch.addcmul(logits, fraction[:, None], logits_way)
        reached, slopes = problem.fit(tried)
        reached = reached + constant + fraction * (linear + fraction * quadratic)
        worse = ~(reached <= highest + SUFFICIENT * fraction * slope)
        if not bool(worse.any()):
            return fraction, tried, slopes
        fraction = torch.where(worse, fraction / 2, fraction)
    stuck = worse[:, None]
    return fraction.masked_fill(worse, 0), logits.where(stuck, tried), residual.where(stuck, slopes)


def anchors_around(means: Tensor) -> tuple[Gaussians, Gaussians]:
    """Put `gamma I` around each mean `[K, D]`, and match one Gaussian to the equally weighted mixture of them."""
    between = torch.cov(means.mT, correction=0).reshape(means.shape[1], means.shape[1])
    # The largest singular value of Cov_k(mu_k), from the K x K Gram matrix where K < D.
    centred = means - means.mean(0)
    small = between if len(means) > means.shape[1] else centred @ centred.mT / len(means)
    gamma = torch.linalg.eigvalsh(small)[-1].clamp_min(0) / GAMMA_DIVISOR
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
