"""TTAC++ on real images: a ResNet-20 trained on `cifar10-jpg`, five strong shifts, a stream of 10,000.

    python experiments/cifar10_jpg.py --data DIR --out results/cifar10-jpg

`DIR` holds `{train,test}_{images,labels}.npy`. The source model is trained once (24 epochs, about an hour on two cores)
and kept in `--cache`; a run whose record exists is not run again, so an interrupted command goes on, and `--shifts` and
`--contenders` let processes share the work. The outcome stands in the README of `--out`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jsonargparse import auto_cli
from torch import Tensor

import ttac
from ttac.data import shifts
from ttac.demo import Contender
from ttac.source.models import ModelDescription, load_model, save_model
from ttac.source.networks import ResNet
from ttac.source.train import Recipe, train_source

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHIFTS: dict[str, shifts.Shift] = {
    "gaussian noise": partial(shifts.gaussian_noise, sigma=0.10),
    "impulse noise": partial(shifts.impulse_noise, share=0.08),
    "blur": partial(shifts.blur, sigma=1.3),
    "contrast": partial(shifts.low_contrast, factor=0.15),
    "fog": partial(shifts.fog, strength=1.5),
}
CYCLES = (
    Recipe(epochs=16, lr=0.1, weight_decay=5e-4, seed=0),
    Recipe(epochs=8, lr=0.06, weight_decay=1e-4, seed=1),
)
NO_QUEUE = {"queue": 0, "passes": 1, "warmup": False}
QUEUE = {"queue": 1024, "passes": 2}


CONTENDERS = (
    Contender("TEST", "test", None, "N-O-SF", {}),
    Contender("BN", "bn", None, "N-O-SF", {}),
    Contender("TENT", "tent", None, "N-O-SF", {}),
    Contender("TTAC SL, no queue", "ttac", "collected", "N-O-SL", NO_QUEUE),
    Contender("TTAC++ SF, no queue", "ttac++", "inferred", "N-O-SF", NO_QUEUE),
    Contender("TTAC++ SL, no queue", "ttac++", "collected", "N-O-SL", NO_QUEUE),
    Contender("TTAC++ SF, queue 1024 x 2", "ttac++", "inferred", "N-O-SF", QUEUE),
    Contender("TTAC++ SL, queue 1024 x 2", "ttac++", "collected", "N-O-SL", QUEUE),
)


def load(data: Path, split: str) -> tuple[Tensor, Tensor]:
    """Read images `[N, 3, 32, 32]` uint8 and labels `[N]` of a split."""
    images = torch.from_numpy(np.load(data / f"{split}_images.npy")).permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(np.load(data / f"{split}_labels.npy")).long()


def source_model(data: Path, cache: Path) -> ttac.Classifier:
    """Train the source model, or load the one that is there."""
    file = cache / "cifar10-jpg-resnet20.safetensors"
    if not file.exists():
        torch.manual_seed(0)
        network = ResNet(20, len(CLASSES)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        classifier = ttac.Classifier(network, mean=MEAN, std=STD)
        images, labels = load(data, "train")
        for cycle in CYCLES:
            train_source(
                classifier,
                images,
                labels,
                cycle,
                progress=lambda epoch, of, loss: print(f"epoch {epoch}/{of}: training loss {loss:.3f}", flush=True),
            )
        save_model(file, network, ModelDescription("resnet20", 10, 3, MEAN, STD, (32, 32), CLASSES))
    classifier = load_model(str(file)).classifier
    return classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def batches(images: Tensor, labels: Tensor, size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut uint8 images into arrival batches in [0, 1]."""
    for part, truth in zip(images.split(size), labels.split(size), strict=True):
        yield part.float() / 255, truth


def shifted(images: Tensor, shift: shifts.Shift, seed: int) -> Tensor:
    """Apply a shift in parts and store it as an 8-bit camera would."""
    generator = torch.Generator().manual_seed(seed)
    parts = [shift(part.float() / 255, generator) for part in images.split(500)]
    return torch.cat([(part * 255).round().clamp(0, 255).byte() for part in parts])


def main(
    data: Path,
    out: Path = Path("results/cifar10-jpg"),
    cache: Path = Path("out/cache"),
    shifts: list[str] | None = None,
    contenders: list[str] | None = None,
    samples: int = 10_000,
    seed: int = 0,
    threads: int = 2,
) -> None:
    """Run what has no record yet and write the table of all that has one.

    Args:
        data: folder with the arrays of `cifar10-jpg`.
        out: folder for records and the table.
        cache: folder for the source model and its statistics.
        shifts: some of the shifts (default: all).
        contenders: some of the contenders, by title (default: all).
        samples: length of the stream.
        seed: order of the stream and draws of the shifts; the methods' own seed.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    classifier = source_model(data, cache)
    file = cache / f"statistics-{classifier.fingerprint()}.safetensors"
    if not file.exists():
        ttac.SourceStatistics.collect(classifier, batches(*load(data, "train"))).save(file)
    statistics = {
        "collected": ttac.SourceStatistics.load(file, classifier),
        "inferred": ttac.SourceStatistics.infer(classifier),
    }
    images, labels = load(data, "test")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:samples]
    images, labels = images[order], labels[order]
    run_one(
        out / f"clean-test-{samples}-{seed}.json", classifier, CONTENDERS[0], statistics, images, labels, seed, "clean"
    )
    for shift in shifts or SHIFTS:
        target = shifted(images, SHIFTS[shift], seed)
        for contender in CONTENDERS:
            if contenders is None or contender.title in contenders:
                name = (
                    f"{shift}-{contender.title}-{samples}-{seed}".replace(",", "")
                    .replace(" ", "-")
                    .replace("++", "pp")
                    .lower()
                )
                run_one(out / f"{name}.json", classifier, contender, statistics, target, labels, seed, shift)
    write_tables(out)


def run_one(
    path: Path,
    classifier: ttac.Classifier,
    contender: Contender,
    statistics: dict[str, ttac.SourceStatistics],
    images: Tensor,
    labels: Tensor,
    seed: int,
    domain: str,
) -> None:
    """Evaluate one contender on one domain unless its record is there."""
    if path.exists():
        return
    stats = statistics[contender.statistics] if contender.statistics else None
    adapter = ttac.adapt(classifier, contender.method, stats=stats, seed=seed, **contender.options)
    record = ttac.evaluate(
        adapter,
        batches(images, labels),
        protocol=contender.protocol,
        notes={"data": "cifar10-jpg test", "domain": domain, "contender": contender.title, "stream_seed": seed},
    )
    record.save(path)
    print(f"{domain:16} {contender.title:28} {record.error:6.2f} %  {record.seconds:6.0f} s", flush=True)


def write_tables(out: Path) -> None:
    """Write the errors of all records in `out`: a table for each length of stream, longer ones cut to it."""
    records = [ttac.Record.load(path) for path in sorted(out.glob("*.json"))]
    clean = max((r for r in records if r.provenance["domain"] == "clean"), key=lambda record: record.samples).error
    shifted = [record for record in records if record.provenance["domain"] != "clean"]
    text = f"# cifar10-jpg, ResNet-20\n\n{__doc__}\n\nClean test error: {clean:.2f} %.\n"
    for length in sorted({record.samples for record in shifted}, reverse=True):
        text += "\n" + "\n".join(table(shifted, length)) + "\n"
    (out / "README.md").write_text(text)
    print(text)


def table(records: list[ttac.Record], length: int) -> Iterator[str]:
    """Lay out the errors after `length` samples in Markdown."""
    errors = {
        (record.provenance["contender"], record.provenance["domain"]): dict(record.cumulative_error)[length]
        for record in records
        if record.samples >= length
    }
    domains = [name for name in SHIFTS if any(domain == name for _, domain in errors)]
    yield f"| error (%), n = {length} | {' | '.join(domains)} | mean |"
    yield "|---" * (len(domains) + 2) + "|"
    for contender in CONTENDERS:
        row = [errors.get((contender.title, domain)) for domain in domains]
        known = [error for error in row if error is not None]
        if known:
            cells = [f"{error:.2f}" if error is not None else "-" for error in row]
            mean = f"{sum(known) / len(known):.2f}" if len(known) == len(row) else "-"
            yield f"| {contender.title} | {' | '.join(cells)} | {mean} |"


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
