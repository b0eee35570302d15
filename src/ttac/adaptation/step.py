"""The only place where a model is moved: backward pass, one decision, optimizer, half precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ttac.adaptation.reduction import Reduction
from ttac.common.state import Stateful

HALF = (torch.float16, torch.bfloat16)
COSTLY_EVERY = 16  # steps between two values of losses whose value costs more than their gradient


@dataclass(frozen=True)
class Surrogate:
    """A loss whose gradients by tensors of the graph are known in closed form; `value` is asked when it is told."""

    tensors: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]  # of the same shapes and types
    value: Callable[[], Tensor]


# A loss may be a function: it is computed when the others have been differentiated and their activations are gone.
Loss = Tensor | Surrogate | Callable[[], Tensor]


class GradientSteps(Stateful):
    """Takes gradient steps on named parameters, and none at all where a loss or a gradient is not finite.

    >>> weight = nn.Parameter(torch.ones(1))
    >>> steps = GradientSteps({"weight": weight}, lambda values: torch.optim.SGD(values, 0.1))
    >>> steps.take({"good": weight.sum(), "bad": weight.sum() * float("nan")}), weight.item(), steps.skipped
    (False, 1.0, 1)
    >>> steps.take({"good": weight.sum()}), round(weight.item(), 3), steps.values["good"].item()
    (True, 0.9, 1.0)
    """

    optimizer: torch.optim.Optimizer
    masters: dict[str, Tensor]
    taken: int
    skipped: int
    told: dict[str, int]  # the step at which each costly value was told last

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        reduction: Reduction | None = None,
        *,
        trust: float = 0.0,
    ) -> None:
        """Move `parameters`; with `trust`, no step (without momentum) is longer than this share of their norm."""
        self.parameters = dict(parameters)
        self.trust = trust
        self.values: dict[str, Tensor] = {}  # of the last step's losses
        self._surrogates: dict[str, Surrogate] = {}
        self._reduction = reduction or Reduction()

        def masters() -> dict[str, Tensor]:
            # Half-precision weights lose steps below 0.4 % of their size, so those are taken on float32 copies.
            return {name: value.detach().float() for name, value in self.parameters.items() if value.dtype in HALF}

        def optimizer() -> torch.optim.Optimizer:
            return make_optimizer([self.masters.get(name, value) for name, value in self.parameters.items()])

        self.declare(masters=masters, taken=lambda: 0, skipped=lambda: 0, told=dict)
        if self.parameters:
            self.declare(optimizer=optimizer)

    def set_rate(self, lr: float) -> None:
        """Use the learning rate `lr` from now on, times the `rate_factor` of a parameter group that has one."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("rate_factor", 1.0)

    def take(self, losses: Mapping[str, Loss], sound: Tensor | None = None) -> bool:
        """Descend on the sum of `losses`; False says that the step was refused and no weight has changed.

        `sound` is a flag of the caller's that the step needs as well. All flags are looked at once, together.
        """
        self._forget_gradients()
        self.values = {}
        self._surrogates = {name: loss for name, loss in losses.items() if isinstance(loss, Surrogate)}
        flags = [] if sound is None else [sound]
        later = {name: loss for name, loss in losses.items() if callable(loss) and not isinstance(loss, Tensor)}
        flags += self._differentiate({name: loss for name, loss in losses.items() if name not in later})
        if later:
            flags += self._differentiate({name: loss() for name, loss in later.items()})
        if self.parameters:  # whatever this rank has found, as the others wait for it here
            self._reduction.gradients(self.parameters.values())
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        if gradients:  # the largest entries, as sums of squares overflow in half precision
            flags.append(torch.stack(torch._foreach_norm(gradients, float("inf"))).isfinite().all())
        fine = self._reduction.decide(torch.stack(flags).all() if flags else torch.tensor(True))
        if not fine:
            self.skipped += 1
            self.values, self._surrogates = {}, {}
        elif gradients:  # nothing to descend on is no failure: the pass has still moved the statistics
            self._descend()
            self.taken += 1
        self._forget_gradients()
        return fine

    def sample_costly_values(self) -> None:
        """Tell the values of losses where that costs, every so many steps, when what they go by has been stored."""
        for name, loss in self._surrogates.items():
            if self.taken - self.told.get(name, -COSTLY_EVERY) >= COSTLY_EVERY:
                self.told[name] = self.taken
                # What is told of a step that has been taken must not end the stream.
                with torch.no_grad(), suppress(RuntimeError):
                    self.values[name] = loss.value()
        self._surrogates = {}

    def _differentiate(self, losses: Mapping[str, Loss]) -> list[Tensor]:
        """Add the gradients of the sum of `losses`: a flag that says whether it is finite, where there is a sum."""
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        terms: list[Tensor] = []
        for name, loss in losses.items():
            if isinstance(loss, Surrogate):
                roots += loss.tensors
                seeds += loss.gradients
            elif isinstance(loss, Tensor):
                terms.append(loss)
                self.values[name] = loss.detach()
        total = torch.stack([term.float() for term in terms]).sum() if terms else None
        if total is not None and total.requires_grad:
            roots.append(total)
            seeds.append(torch.ones_like(total))
        if roots:
            torch.autograd.backward(roots, seeds)
        return [] if total is None else [total.detach().isfinite()]

    def _descend(self) -> None:
        for name, master in self.masters.items():
            gradient = self.parameters[name].grad
            master.grad = None if gradient is None else gradient.float()
        if self.trust:
            self._shorten()
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)
        torch.clear_autocast_cache()  # of a caller's autocast, which would go on with the weights of before

    def _shorten(self) -> None:
        """Scale the gradients down where a plain step would move the weights by more than the share `trust`."""
        # Those of masters, as half precision has no digits for what becomes small.
        moved = [self.masters.get(name, value) for name, value in self.parameters.items()]
        gradients = [value.grad for value in moved if value.grad is not None]
        slope, weights = (
            torch.stack([norm.float() for norm in torch._foreach_norm(tensors)]).norm()
            for tensors in (gradients, [value.detach() for value in moved])
        )
        step = self.optimizer.param_groups[0]["lr"] * slope
        torch._foreach_mul_(gradients, (self.trust * weights / step.clamp_min(1e-30)).clamp_max(1.0))

    def _forget_gradients(self) -> None:
        for value in (*self.parameters.values(), *self.masters.values()):
            value.grad = None
