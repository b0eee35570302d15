"""Train a source classifier on images that fit in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttac.data.views import random_crop, random_flip

Progress = Callable[[int, int, float], None]  # epoch, epochs, mean training loss


def train_source(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch: int = 128,
    lr: float = 0.1,
    weight_decay: float = 5e-4,
    flip: bool = True,
    padding: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Train `network` (raw images in [0, 1] to logits) on uint8 `images [N, C, H, W]` by SGD with a one-cycle rate.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    >>> train_source(network, torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.zeros(8).long(), epochs=1, batch=4)
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(network.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=weight_decay)
    steps = len(images) // batch  # the last partial batch of every shuffled epoch is left out
    if steps < 1:
        raise ValueError(f"{len(images)} images do not fill one batch of {batch}: lower batch")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * steps, pct_start=0.2)
    network.train()
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        total = 0.0
        for rows in order[: steps * batch].split(batch):
            view = images[rows].float() / 255
            view = random_crop(view, generator, padding=padding)
            view = random_flip(view, generator) if flip else view
            loss = F.cross_entropy(network(view), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        if progress is not None:
            progress(epoch + 1, epochs, total / steps)
    network.eval()
