"""The check sum of a state: equal for equal states alone, and told by a learner that goes on from a snapshot."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import SHAPE, WINDOW, ScriptedGuard, Service, learn_all

from ttac.serving.snapshot import state_digest


def state() -> dict[str, Any]:
    return {
        "weights": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False]), "c": torch.tensor(3)},
        "half": torch.ones(3, dtype=torch.bfloat16),
        "optimiser": {0: {"step": 4}, 1: {}},
        "queue": [torch.zeros(0, 3), torch.zeros(2, dtype=torch.uint8)],
        "numbers": (0.1, None, "text", True),
    }


def test_equal_states_have_one_digest() -> None:
    file = io.BytesIO()
    torch.save(state(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    turned = dict(reversed(read.items()))
    turned["weights"]["a"] = turned["weights"]["a"].T.contiguous().T  # the same numbers, laid out otherwise
    turned["optimiser"] = dict(reversed(turned["optimiser"].items()))
    assert state_digest(state(), None) == state_digest(read, None) == state_digest(turned, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["weights"]["a"][0, 0].copy_(torch.tensor(-0.0)),  # which equals 0
        lambda s: s["weights"].update(a=s["weights"]["a"].reshape(3, 2)),
        lambda s: s["weights"].update(c=torch.tensor(3, dtype=torch.int32)),
        lambda s: s["weights"].update(d=s["weights"].pop("b")),
        lambda s: s["half"][2].add_(0.01),
        lambda s: s["half"].resize_(2),
        lambda s: s["optimiser"][0].update(step=5),
        lambda s: s["optimiser"].pop(1),
        lambda s: s["queue"].reverse(),
        lambda s: s.update(queue=[torch.zeros(0, 4), s["queue"][1]]),
        lambda s: s.update(numbers=(0.1 + 1e-17 + 2e-17, None, "text", 1)),
    ],
)
def test_any_other_state_has_another(change: Callable[[dict[str, Any]], object]) -> None:
    changed = copy.deepcopy(state())
    change(changed)
    assert state_digest(changed) != state_digest(state())
    assert state_digest(changed, None) != state_digest(changed)


@pytest.mark.parametrize("method", ["bn", "ttac++"])
def test_a_restart_tells_the_digest_of_the_snapshot(method: str, tmp_path: Path) -> None:
    service = Service(tmp_path, method)
    images = torch.rand(4 * WINDOW, *SHAPE, generator=torch.Generator().manual_seed(0))
    first = service.started(guard=ScriptedGuard())
    service.push(images[: 2 * WINDOW])
    learn_all(first)
    first.save()
    saved = torch.load(service.folder.snapshot, weights_only=True)
    service.push(images[2 * WINDOW :])
    learn_all(first)  # and is killed
    service.started(guard=ScriptedGuard())
    told = service.journal.tail(1000)
    restored = next(one for one in told if one["event"] == "restore")
    assert restored["state"] == state_digest(saved["adapter"], saved["guard"])
    assert restored["state"] != state_digest(first.adapter.state_dict(), {"seen": 4 * WINDOW})
    assert (restored["samples"], saved["guard"]) == (2 * WINDOW, {"seen": 2 * WINDOW})
    assert restored["version"] == service.serve()[0]
    assert not any("state" in one for one in told if one["event"] == "start")
