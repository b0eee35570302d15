"""Streams of vectors as one Gaussian, against numpy over all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ttac.gaussian import Diagonal, Full, Moments


@pytest.mark.parametrize("diagonal", [False, True])
def test_moments_equal_numpy_with_a_mean_far_from_zero(diagonal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(5000, 4, generator=generator) @ torch.randn(4, 4, generator=generator) + 1000
    moments = Moments(4, diagonal=diagonal)
    for portion in (vectors[:1], vectors[1:1], vectors[1:400], vectors[400:]):
        moments.add(portion)
    found = moments.gaussian(torch.float64)
    assert isinstance(found.covariance, Diagonal if diagonal else Full)
    every = vectors.double().numpy()
    covariance = torch.from_numpy(np.cov(every.T, bias=True))
    torch.testing.assert_close(found.mean[0], torch.from_numpy(every.mean(0)), rtol=1e-7, atol=0)
    expected = torch.diag(covariance.diagonal()) if diagonal else covariance
    # float32 has seven places, of which a mean of 1000 takes three; raw squares would leave none.
    torch.testing.assert_close(found.covariance.dense()[0], expected, rtol=1e-4, atol=1e-4)
