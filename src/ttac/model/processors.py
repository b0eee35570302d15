"""Image processors of transformers, read as what they do to pixels in [0, 1]."""

from __future__ import annotations

from typing import Any, NamedTuple

from ttac.model.pixels import Pixels


class Preprocessing(NamedTuple):
    """How a network wants images: normalised, and of which size."""

    pixels: Pixels
    size: tuple[int, int] | None
    crop_pct: float = 1.0


def read_processor(processor: Any) -> Preprocessing:
    """Read mean and std for pixels in [0, 1], size, and crop off an image processor of transformers."""
    if not hasattr(processor, "image_mean"):
        raise ValueError(
            f"{type(processor).__name__} says nothing of pixels: give an image processor of transformers, or a "
            "processor that has one"
        )
    if getattr(processor, "do_flip_channel_order", False):
        raise ValueError(
            f"{type(processor).__name__} turns the channels round (BGR), which is not supported: wrap the model in a "
            "module that does so, and use ttac.Classifier"
        )
    # What the processor makes of a pixel x in [0, 1]: (scale * x - shift - mean) / std.
    rescaled = getattr(processor, "do_rescale", False)
    scale = 255 * processor.rescale_factor if rescaled else 255.0
    shift = 1.0 if rescaled and getattr(processor, "rescale_offset", False) else 0.0
    normalised = getattr(processor, "do_normalize", False) and processor.image_mean is not None
    means = processor.image_mean if normalised else (0.0,)
    stds = processor.image_std if normalised else (1.0,)
    twice = stds if getattr(processor, "include_top", False) else [1.0] * len(stds)  # as EfficientNet's divides by std
    pixels = Pixels(
        tuple((shift + mean) / scale for mean in means),
        tuple(std * again / scale for std, again in zip(stds, twice, strict=True)),
    )
    if not getattr(processor, "do_resize", True):
        return Preprocessing(pixels, None)
    resized, cropped = _sides(processor.size), None
    if getattr(processor, "do_center_crop", False):
        cropped = _sides(processor.crop_size)
    elif getattr(processor, "crop_pct", None) is not None and max(resized) < 384:  # of ConvNext, for smaller ones
        return Preprocessing(pixels, resized, processor.crop_pct)
    return Preprocessing(pixels, cropped or resized, 1.0 if cropped is None else min(cropped[0] / resized[0], 1.0))


def _sides(size: Any) -> tuple[int, int]:
    """Read height and width of the ways that processors tell a size in."""
    if isinstance(size, int):
        return size, size
    short = size.get("shortest_edge") or size.get("longest_edge")
    return (size["height"], size["width"]) if size.get("height") else (short, short)
