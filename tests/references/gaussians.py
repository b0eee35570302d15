"""Gaussians of every family with random parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from ttac.gaussian import Covariance, Diagonal, Full, Gaussians, Isotropic, LowRank, RunningGaussians

D, G = 6, 3


def make_covariance(family: str, seed: int, count: int = G, dim: int = D) -> Covariance:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if family == "full":
        root = draw(count, dim, 2 * dim)
        return Full(root @ root.mT / dim)
    if family == "diagonal":
        return Diagonal(draw(count, dim).square() + 0.1)
    if family == "low-rank":
        return LowRank(draw(count, dim, 2), draw(count).square() + 0.1)
    return Isotropic(draw(count).square() + 0.1, torch.tensor(dim))


def gaussians(family: str, seed: int, count: int = G, dim: int = D) -> Gaussians:
    mean = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64)
    return Gaussians(mean, make_covariance(family, seed, count, dim))


def stored(running: RunningGaussians) -> dict[str, Tensor]:
    """All tensors of running Gaussians by name, as they are, not copied."""
    return {"mean": running.gaussians.mean, "counts": running.counts, **running.gaussians.covariance.tensors()}


def copied(running: RunningGaussians) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in stored(running).items()}
