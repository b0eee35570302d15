"""The only place where a model is adapted: backward pass, optimiser and mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


class Updater:
    """Takes gradient steps on named parameters, and none at all where a loss or a gradient is not finite.

    >>> weight = nn.Parameter(torch.ones(1))
    >>> updater = Updater({"weight": weight}, lambda values: torch.optim.SGD(values, 0.1))
    >>> updater.step({"good": weight.sum(), "bad": weight.sum() * float("nan")}), weight.item(), updater.skipped
    (False, 1.0, 1)
    >>> updater.step({"good": weight.sum()}), round(weight.item(), 3)
    (True, 0.9)
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = dict(parameters)
        # Half-precision weights lose steps below 0.4 % of their size, so those are taken on float32 copies.
        self._masters = {name: value.detach().float() for name, value in self.parameters.items() if value.dtype in HALF}
        self.optimizer = make_optimizer([self._masters.get(name, value) for name, value in self.parameters.items()])
        self.steps = 0
        self.skipped = 0

    def set_rate(self, lr: float) -> None:
        """Use the learning rate `lr` from now on, times the `rate_factor` of a parameter group that has one."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("rate_factor", 1.0)

    def step(self, losses: Mapping[str, Tensor], later: Callable[[], Mapping[str, Tensor]] | None = None) -> bool:
        """Descend on the sum of `losses`; False says that the step was refused and no weight has changed.

        `later` computes losses of the same step that share no graph with the first: they come when the activations
        behind those are gone, so that only one of the two is in memory at a time.
        """
        self._forget_gradients()
        moved = finite = self._differentiate(losses)
        if later is not None and finite is not False:
            finite = self._differentiate(later())
            moved = finite if moved is None else moved and finite is not False
        if moved:
            gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
            moved = bool(torch.stack(torch._foreach_norm(gradients)).isfinite().all())
        if moved:
            self._descend()
            self.steps += 1
        elif moved is not None:
            self.skipped += 1
        self._forget_gradients()
        return moved is not False  # nothing to descend on is no failure: the pass has still moved the statistics

    @staticmethod
    def _differentiate(losses: Mapping[str, Tensor]) -> bool | None:
        """Add the gradients of the sum of `losses`: whether it is finite, None where there is nothing to descend on."""
        total = torch.stack([loss.float() for loss in losses.values()]).sum() if losses else None
        if total is None or not total.requires_grad:
            return None
        finite = bool(total.isfinite())
        if finite:
            total.backward()
        return finite

    def _descend(self) -> None:
        for name, master in self._masters.items():
            gradient = self.parameters[name].grad
            master.grad = None if gradient is None else gradient.float()
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self.parameters[name].copy_(master)

    def _forget_gradients(self) -> None:
        for value in (*self.parameters.values(), *self._masters.values()):
            value.grad = None

    def state(self) -> dict[str, Any]:
        """Give the optimiser's state and the counters."""
        counts = {"steps": self.steps, "skipped": self.skipped}
        return {"optimizer": self.optimizer.state_dict(), "masters": dict(self._masters), **counts}

    def load(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.skipped = state["steps"], state["skipped"]
        for name, master in self._masters.items():
            master.copy_(state["masters"][name])
