"""Grey images where colour matters."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from torch import Tensor

from ttac.model.colour import grey

Rest = ParamSpec("Rest")


def in_colour(apply: Callable[Concatenate[Tensor, Rest], Tensor]) -> Callable[Concatenate[Tensor, Rest], Tensor]:
    """Let a corruption of RGB take grey images `[N, 1, H, W]` too.

    Grey is taken as RGB with three equal channels, and the result turned back into grey by its luma.

    >>> import torch
    >>> in_colour(lambda images: 2 * images)(torch.full((1, 1, 8, 8), 0.25)).unique()
    tensor([0.5000])
    """

    @wraps(apply)
    def coloured(images: Tensor, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Tensor:
        if images.shape[1] == 3:
            return apply(images, *args, **kwargs)
        return grey(apply(images.expand(-1, 3, -1, -1), *args, **kwargs).clamp(0, 1))

    return coloured
