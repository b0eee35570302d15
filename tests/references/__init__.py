"""The corruptions written an image at a time, as anyone would, to compare the batched ones with."""

from __future__ import annotations

from references import noise_and_blur, weather_and_digital

REFERENCES = noise_and_blur.REFERENCES | weather_and_digital.REFERENCES
