"""How fast the corruptions are: images a second at both published sizes, and against a loop over images at 32 x 32.

    python benchmarks/corruptions.py [--batch 256] [--rounds 5] [--out FILE]

The loop is the per-image SciPy and Pillow code that the tests compare with. Both sides take turns and the medians are
compared; the ratio for all nineteen is that of the sums.
Images are smooth random fields, as the time of none but JPEG depends on what they show.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jsonargparse import auto_cli
from timing import median_seconds
from torch import Tensor
from torch.nn import functional as F

from ttac.common.environment import environment
from ttac.common.files import write_json
from ttac.data.corruptions import CORRUPTIONS, EXTRA, Corruption
from ttac.data.corruptions.constants import LARGE, SEVERITIES, SMALL, constants

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from references import REFERENCES

Loop = Callable[[np.ndarray, tuple[float, ...], np.random.Generator], np.ndarray]


def smooth_images(count: int, side: int) -> Tensor:
    """Make uint8 images `[count, 3, side, side]` of random colours that change smoothly."""
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return (255 * F.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1)).byte()


def loop_over(images: np.ndarray, name: str, severity: int) -> None:
    """Corrupt images `[N, H, W, C]` one by one."""
    reference: Loop = REFERENCES[name]
    values, generator = constants(name, severity, images.shape[1]), np.random.default_rng(0)
    for image in images:
        reference(image, values, generator)


def main(
    batch: int = 256, looped: int = 16, large_batch: int = 16, rounds: int = 5, threads: int = 2,
    severities: tuple[int, ...] = SEVERITIES, out: Path | None = None,
) -> None:  # fmt: skip
    """Measure all nineteen corruptions.

    Args:
        batch: images of 32 x 32 at a time.
        looped: images of 32 x 32 that the loop gets.
        large_batch: images of 224 x 224 at a time.
        rounds: measurements of each side.
        threads: of torch.
        severities: over which times are averaged.
        out: JSON file for the outcome.
    """
    torch.set_num_threads(threads)
    small, large = smooth_images(batch, SMALL), smooth_images(large_batch, LARGE)
    few = small[:looped].permute(0, 2, 3, 1).numpy()
    rows: dict[str, dict[str, float]] = {}
    print(f"{'':18}{'images/s at 32':>16}{'loop':>10}{'ratio':>8}{'images/s at 224':>17}")
    for name in (*CORRUPTIONS, *EXTRA):
        seconds = np.zeros(3)
        for severity in severities:
            corruption = Corruption(name, severity)
            jobs = (
                partial(corruption, small, torch.arange(batch)),
                partial(loop_over, few, name, severity),
                partial(corruption, large, torch.arange(large_batch)),
            )
            counts = (batch, looped, large_batch)
            seconds += np.array(median_seconds(*jobs, rounds=rounds)) / counts / len(severities)
        own, loop, at_large = seconds.tolist()
        rows[name] = {"seconds_32": own, "loop_seconds_32": loop, "ratio": loop / own, "seconds_224": at_large}
        print(f"{name:18}{1 / own:16.0f}{1 / loop:10.0f}{loop / own:8.1f}{1 / at_large:17.1f}", flush=True)
    own, loop = (sum(row[key] for row in rows.values()) for key in ("seconds_32", "loop_seconds_32"))
    print(f"{'all nineteen':18}{19 / own:16.0f}{19 / loop:10.0f}{loop / own:8.1f}")
    if out is not None:
        total = {"seconds_32": own, "loop_seconds_32": loop, "ratio": loop / own}
        write_json(out, {"rows": rows, "all": total, "batch": batch, "environment": environment()})


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
