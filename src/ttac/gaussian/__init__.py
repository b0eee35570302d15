"""The arithmetic of anchored clustering: families of covariances, running estimates, divergences."""

from ttac.gaussian.axis_aligned import Diagonal, Isotropic
from ttac.gaussian.covariance import Covariance
from ttac.gaussian.divergence import (
    RIDGE,
    Direction,
    divergence,
    divergence_gradients,
    kl_divergence,
    moment_distance,
    moment_gradients,
    responsibilities,
)
from ttac.gaussian.families import FAMILIES, Gaussians, choose_family
from ttac.gaussian.full import Full
from ttac.gaussian.low_rank import LowRank
from ttac.gaussian.moments import Moments
from ttac.gaussian.running import Blend, Part, RunningGaussians

__all__ = [
    "FAMILIES",
    "RIDGE",
    "Blend",
    "Covariance",
    "Diagonal",
    "Direction",
    "Full",
    "Gaussians",
    "Isotropic",
    "LowRank",
    "Moments",
    "Part",
    "RunningGaussians",
    "choose_family",
    "divergence",
    "divergence_gradients",
    "kl_divergence",
    "moment_distance",
    "moment_gradients",
    "responsibilities",
]
