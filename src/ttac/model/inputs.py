"""What a classifier takes: how a batch is checked, normalised, kept in memory and varied. Images are the first kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ttac.common.state import Stateful, tensor_bytes
from ttac.model.pixels import RAW, UnknownPixelsError
from ttac.model.views import StrongView, strong_view, weak_view

# Interpolation overshoots a little; images in 0..255 or already normalised are far outside.
SLACK = 0.25


class ImageInput(nn.Module):
    """Raw images `[N, C, H, W]` in [0, 1], and the mean and std that the network wants them normalised by.

    Without them the network takes features as they are, and images are refused. Another kind of input has the same
    methods; nothing that adapts looks into a sample itself.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        channels: int | None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.channels = channels  # None: the network takes any number
        self._known = mean is not None and std is not None
        self._register_pixels("mean", RAW.mean if mean is None else mean, device)
        self._register_pixels("std", RAW.std if std is None else std, device)
        if not bool((self.std > 0).all()):
            raise ValueError(f"std must be positive, not {self.std.flatten().tolist()}")
        self._raw = not bool(self.mean.any()) and bool((self.std == 1).all())

    def _register_pixels(self, name: str, values: Sequence[float], device: torch.device | str) -> None:
        numbers = [float(value) for value in values]
        if len(numbers) not in (1, self.channels):
            raise ValueError(
                f"{name} has {len(numbers)} values where {self.channels} channels are expected: "
                "pass mean and std with one value for each channel of an image"
            )
        pixels = torch.tensor(numbers, dtype=torch.float32, device=device).reshape(1, -1, 1, 1)
        self.register_buffer(name, pixels, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ImageInput:
        """Move `mean` and `std` with the model, but keep them in float32: a cast to bfloat16 would round them."""
        exact = (self.mean, self.std)
        super()._apply(fn, recurse)
        self.mean, self.std = (tensor.to(self.mean.device) for tensor in exact)
        return self

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self.mean.device

    def check(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Return images on this device and in one precision, or raise an error that says what is wrong with them."""
        return check_images(images, self.channels).to(self.device, dtype)

    def normalise(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Make what the network takes, in memory of its own, as a network may write to its input."""
        if not self._known and images.ndim == 4:
            raise UnknownPixelsError("a network with a linear layer first")
        if self._raw:
            return images.to(dtype, copy=True)
        return (images - self.mean).div_(self.std).to(dtype)

    def storage(self, capacity: int) -> ImageStorage:
        """Make a place to keep samples in."""
        return ImageStorage(capacity, self.device)

    def weak(self, images: Tensor, generator: torch.Generator, *, flip: bool, crop: bool) -> Tensor:
        """Make weak views of images."""
        return weak_view(images, generator, flip=flip, crop=crop)

    def strong(
        self,
        images: Tensor,
        generator: torch.Generator,
        *,
        flip: bool,
        kind: StrongView,
        operations: int,
        magnitude: int | None,
        strength: float,
    ) -> Tensor:
        """Make strong views of images."""
        return strong_view(
            images, generator, flip=flip, kind=kind, operations=operations, magnitude=magnitude, strength=strength
        )


def levels_of(images: Tensor, *, multiplied: bool = False) -> Tensor | None:
    """Give the levels 0 ... 255 of images that `pixels_of` gives back bit for bit, None where a value is lost.

    >>> levels_of(torch.tensor([0.0, 1.0])), levels_of(torch.tensor([0.0, 0.5]))
    (tensor([  0, 255], dtype=torch.uint8), None)
    """
    levels = (255 * images.float()).round().to(torch.uint8)  # half precision would round 255 x to a neighbour
    again = pixels_of(levels, images.dtype, multiplied=multiplied)
    # Bits, as -0 equals 0.
    made, given = (pixels.contiguous().view(torch.uint8) for pixels in (again, images))
    return levels if torch.equal(made, given) else None


def pixels_of(levels: Tensor, dtype: torch.dtype, *, multiplied: bool = False) -> Tensor:
    """Divide levels by 255, or multiply them by 1 / 255 as some loaders do, which gives other bits."""
    if multiplied:
        return levels.to(dtype) * (1 / 255)
    # By a tensor, as a GPU multiplies by the reciprocal of a number.
    return levels.to(dtype) / torch.tensor(255, dtype=dtype, device=levels.device)


class ImageStorage(Stateful):
    """Places for `capacity` images, made whole with the first one; what is read is bit for bit what was written.

    Images are held as 8-bit levels as long as all that came are exactly that, and from then on as they come.

    >>> storage = ImageStorage(2)
    >>> storage.write(torch.tensor([1]), torch.ones(1, 3, 2, 2))
    >>> storage.read(torch.tensor([1])).unique(), storage.images.dtype
    (tensor([1.]), torch.uint8)
    """

    images: Tensor | None
    dtype: str
    multiplied: bool

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity, self.device = capacity, device
        self.declare(
            images=lambda: None,  # [capacity, C, H, W]
            dtype=lambda: "float32",  # of the stream; where all of it is 8-bit, `images` is uint8
            multiplied=lambda: False,  # how the stream was made of levels, see `pixels_of`
        )

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave, on this device."""
        super().load_state(state)
        if self.images is not None:
            kinds = (torch.uint8, getattr(torch, self.dtype, None))
            if not isinstance(self.images, Tensor) or self.images.dtype not in kinds:
                raise ValueError(f"the stored images are not of {self.dtype}")
            if self.images.ndim != 4 or len(self.images) != self.capacity:
                raise ValueError(f"the stored images are not {self.capacity}")
            self.images = self.images.to(self.device)

    def check(self, images: Tensor) -> None:
        """Raise an error where images do not have the shape of those that came before."""
        if self.images is not None and images.shape[1:] != self.images.shape[1:]:
            raise ValueError(
                f"images are {tuple(images.shape[1:])}, those before were {tuple(self.images.shape[1:])}: "
                "resize all images of a stream to one size"
            )

    def write(self, places: Tensor, images: Tensor) -> None:
        """Put images `[n, C, H, W]` at places `[n]`."""
        self.check(images)
        if self.images is None:
            self.images = images.new_zeros(self.capacity, *images.shape[1:], dtype=torch.uint8)
            self.dtype = str(images.dtype).removeprefix("torch.")
            self.multiplied = levels_of(images) is None  # if they are levels at all
        images = images.detach().to(getattr(torch, self.dtype))
        if self.images.dtype == torch.uint8:
            levels = levels_of(images, multiplied=self.multiplied)
            if levels is None:
                self.images = self._pixels(self.images)
            else:
                images = levels
        self.images[places] = images

    def read(self, places: Tensor) -> Tensor:
        """Give the images at places `[n]`: `[n, C, H, W]`."""
        assert self.images is not None, "nothing has been stored"
        images = self.images[places]
        return self._pixels(images) if images.dtype == torch.uint8 else images

    def _pixels(self, levels: Tensor) -> Tensor:
        return pixels_of(levels, getattr(torch, self.dtype), multiplied=self.multiplied)

    @property
    def limit(self) -> int:
        """The bytes that it can come to: those of now, and of images whose levels are not enough."""
        assert self.images is not None, "nothing has been stored"
        return tensor_bytes(self) + self.images.numel() * (getattr(torch, self.dtype).itemsize - self.images.itemsize)


def check_images(images: Tensor, channels: int | None) -> Tensor:
    """Return `images [N, C, H, W]` as they are, or raise an error that says what is wrong and what to do.

    `channels` None leaves their number to the model.

    >>> check_images(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 3)
    Traceback (most recent call last):
    TypeError: images are torch.uint8; expected floating point in [0, 1]: use images.float() / 255
    """
    if not isinstance(images, Tensor):
        raise TypeError(f"images are {type(images).__name__}; expected a torch.Tensor of shape [N, C, H, W]")
    if images.ndim != 4:
        hint = ": add the batch dimension with images[None]" if images.ndim == 3 else ""
        raise ValueError(f"images have shape {tuple(images.shape)}; expected [N, C, H, W]{hint}")
    if not images.is_floating_point():
        hint = ": use images.float() / 255" if images.dtype == torch.uint8 else ""
        raise TypeError(f"images are {images.dtype}; expected floating point in [0, 1]{hint}")
    if channels is not None and images.shape[1] != channels:
        raise ValueError(
            f"images have {images.shape[1]} channels; the model takes {channels}, by the mean and std that "
            "ttac.Classifier was given or else by its first convolution"
        )
    if images.numel() == 0:
        raise ValueError(f"the batch is empty (shape {tuple(images.shape)}); pass at least one image")
    low, high = torch.stack(torch.aminmax(images)).tolist()
    if not (low > -float("inf") and high < float("inf")):  # aminmax propagates NaN, and NaN fails both
        bad = (~images.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise ValueError(
            f"images contain NaN or infinity (batch index {', '.join(map(str, bad[:5]))}); drop those images"
        )
    if low < -SLACK or high > 1 + SLACK:
        hint = (
            "Do not normalise them: mean and std belong in ttac.Classifier(model, mean=..., std=...)"
            if low < 0
            else "Divide 8-bit values by 255"
        )
        raise ValueError(f"pixel values span [{low:.3g}, {high:.3g}]; expected raw pixels in [0, 1]. {hint}")
    return images


def check_labels(labels: object, count: int, num_classes: int) -> Tensor:
    """Return labels as an integer tensor `[count]`, or raise an error that says what is wrong.

    >>> check_labels([0, 1], count=2, num_classes=2)
    tensor([0, 1])
    """
    labels = torch.as_tensor(labels)
    if labels.is_floating_point() or labels.shape != (count,):
        shape = tuple(labels.shape)
        raise ValueError(f"labels are {labels.dtype} of shape {shape}; expected integers of shape ({count},)")
    if count and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(f"labels must be in 0..{num_classes - 1}; got {int(labels.min())}..{int(labels.max())}")
    return labels.long()
