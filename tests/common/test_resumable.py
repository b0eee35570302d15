"""Checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ttac.common.resumable import JobFolder


@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_comes_back_to_the_device_it_was_on(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"settings": {"device": "cuda"}}, tmp_path / "progress.pt")
    load, asked = torch.load, []

    def loading(path: Path, *, map_location: object = None, weights_only: bool) -> object:
        asked.append(map_location)
        return load(path, map_location=map_location, weights_only=weights_only)

    monkeypatch.setattr(torch, "load", loading)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    with pytest.raises(ValueError, match="device: cuda there, cpu now"):
        JobFolder(tmp_path, {"device": "cpu"}).saved((), lambda _: None)
    assert asked == [None if there else "cpu"]  # without the device, the settings say that it was another one
