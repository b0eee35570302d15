"""The only place with a backward pass and an optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Updater:
    """Takes gradient steps on named parameters, and none at all where a loss or a gradient is not finite.

    >>> weight = nn.Parameter(torch.ones(1))
    >>> updater = Updater({"weight": weight}, torch.optim.SGD([weight], 0.1))
    >>> updater.step({"good": weight.sum(), "bad": weight.sum() * float("nan")}), weight.item(), updater.skipped
    (False, 1.0, 1)
    >>> updater.step({"good": weight.sum()}), round(weight.item(), 3)
    (True, 0.9)
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.parameters = dict(parameters)
        self.optimizer = optimizer
        self.steps = 0
        self.skipped = 0
        self.losses: dict[str, float] = {}  # of the last step, by name

    def set_rate(self, lr: float) -> None:
        """Use the learning rate `lr` from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, losses: Mapping[str, Tensor]) -> bool:
        """Descend on the sum of `losses`; False says that the step was refused and no weight has changed."""
        self.losses = {name: float(loss.detach()) for name, loss in losses.items()}
        total = torch.stack([loss.float() for loss in losses.values()]).sum() if losses else None
        self.optimizer.zero_grad()
        if total is None or not total.requires_grad:
            return True  # nothing to descend on is no failure: the forward pass has still moved the statistics
        finite = bool(total.isfinite())
        if finite:
            total.backward()
            gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
            finite = bool(torch.stack(torch._foreach_norm(gradients)).isfinite().all())
        if finite:
            self.optimizer.step()
            self.steps += 1
        else:
            self.skipped += 1
        self.optimizer.zero_grad()
        return finite

    def state(self) -> dict[str, Any]:
        """Give the optimiser's state and the counters."""
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps, "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.skipped = state["steps"], state["skipped"]
