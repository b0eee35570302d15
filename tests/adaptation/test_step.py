"""Steps: losses whose gradients are given, and the bound on their length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ttac.adaptation.step import GradientSteps, Surrogate


def plain_sgd(lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda values: torch.optim.SGD(values, lr)


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def look(model: nn.Sequential) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs at two depths and at the end."""
    images = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first = model[:2](images)
    second = model[2:4](first)
    return first, second, model[4](second)


def test_given_gradients_of_several_tensors_are_those_of_autograd() -> None:
    ours, theirs = network(), network()
    steps = GradientSteps(dict(ours.named_parameters()), plain_sgd(0.1))
    first, second, last = look(ours)
    # Of the sum of squares of one and the sum of cubes of the other, the second half of whose rows is left out.
    part = second[:4]
    given = Surrogate(
        (first, part),
        (2 * first.detach(), 3 * part.detach() ** 2),
        lambda: (first.square().sum() + (part**3).sum()).detach(),
    )
    assert steps.take({"given": given, "written": last.exp().mean()})
    assert set(steps.values) == {"written"}
    steps.sample_costly_values()

    first, second, last = look(theirs)
    value = first.square().sum() + (second[:4] ** 3).sum()
    (value + last.exp().mean()).backward()
    assert float(steps.values["given"]) == pytest.approx(float(value.detach()))
    for moved, value in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert value.grad is not None
        torch.testing.assert_close(moved.detach(), (value - 0.1 * value.grad).detach())


@pytest.mark.parametrize("broken", [0, 1])
def test_a_given_gradient_that_is_not_finite_is_refused(broken: int) -> None:
    model = network()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    steps = GradientSteps(dict(model.named_parameters()), plain_sgd(0.1))
    first, second, last = look(model)
    gradients = [torch.ones_like(first), torch.ones_like(second)]
    gradients[broken][0, 0] = torch.nan
    given = Surrogate((first, second), (gradients[0], gradients[1]), lambda: torch.zeros(()))
    assert not steps.take({"given": given, "written": last.sum()})
    assert (steps.taken, steps.skipped, steps.values) == (0, 1, {})
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def weights(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 4), "bias": (5,), "unused": (3,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype).requires_grad_())
        for name, shape in shapes.items()
    }


def sloped(parameters: dict[str, nn.Parameter], slope: float) -> Tensor:
    """A loss whose gradient is `slope` times what was drawn, and 0 by what is unused."""
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in parameters.items()}
    return sum((slope * drawn[name] * parameters[name]).sum() for name in ("matrix", "bias"))  # type: ignore[return-value]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
# The last is a gradient whose square half precision cannot hold.
@pytest.mark.parametrize("slope", [1e-3, 1.0, 2e3])
def test_no_step_is_longer_than_its_share_of_the_weights(dtype: torch.dtype, slope: float) -> None:
    free, bound = ({}, {"trust": 0.01})
    moves = []
    for options in (free, bound):
        parameters = weights(dtype)
        steps = GradientSteps(parameters, plain_sgd(0.1), **options)
        moved = [steps.masters.get(name, value) for name, value in parameters.items()]
        before = flat(moved)
        assert steps.take({"sloped": sloped(parameters, slope)})
        moves.append(flat(moved) - before)
    plain, found = moves
    limit = 0.01 * float(before.norm())
    assert float(found.norm()) <= limit * (1 + 1e-4)
    if float(plain.norm()) <= limit:  # short ones are what they were
        assert slope == 1e-3
        assert torch.equal(found, plain)
    else:
        assert float(found.norm()) == pytest.approx(limit, rel=1e-3)
        assert float(torch.cosine_similarity(found, plain, dim=0)) == pytest.approx(1, abs=1e-6)


def test_a_bound_step_goes_on_where_there_is_no_slope() -> None:
    parameters = weights(torch.float32)
    before = flat(list(parameters.values()))
    steps = GradientSteps(parameters, plain_sgd(0.1), trust=0.01)
    assert steps.take({"flat": sloped(parameters, 0.0)})
    assert torch.equal(flat(list(parameters.values())), before)


def test_small_bound_steps_of_half_precision_add_up() -> None:
    """Each is too short for the weights to show it, and the masters keep it."""
    parameters = weights(torch.float16)
    steps = GradientSteps(parameters, plain_sgd(0.1), trust=1e-6)
    before = flat([steps.masters[name] for name in parameters])
    for _ in range(20):
        assert steps.take({"sloped": sloped(parameters, 1.0)})
    length = float((flat([steps.masters[name] for name in parameters]) - before).norm())
    assert length == pytest.approx(20e-6 * float(before.norm()), rel=0.02)
