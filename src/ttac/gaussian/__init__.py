"""The arithmetic of anchored clustering: families of covariances, running estimates, divergences."""

from ttac.gaussian.divergence import Direction, divergence, kl_divergence, moment_distance, responsibilities
from ttac.gaussian.families import FAMILIES, Covariance, Diagonal, Full, Gaussians, Isotropic, LowRank, choose_family
from ttac.gaussian.running import Blend, RunningGaussians

__all__ = [
    "FAMILIES",
    "Blend",
    "Covariance",
    "Diagonal",
    "Direction",
    "Full",
    "Gaussians",
    "Isotropic",
    "LowRank",
    "RunningGaussians",
    "choose_family",
    "divergence",
    "kl_divergence",
    "moment_distance",
    "responsibilities",
]
