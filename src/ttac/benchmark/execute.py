"""One run, from its ingredients to its record."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from ttac.benchmark.experiment import TargetSpec
from ttac.benchmark.ingredients import Ingredients
from ttac.benchmark.runs import Run
from ttac.common.environment import code_commit
from ttac.common.files import write_json
from ttac.data.streams import Scenario
from ttac.evaluation.engine import Outcome
from ttac.evaluation.evaluate_job import Measurement, Prepared, StreamChoice
from ttac.evaluation.method_choice import MethodChoice
from ttac.evaluation.records import Record
from ttac.methods.base import Adapter
from ttac.source.loading import load_model

POINTS = "ttac.points/1"


class Task(NamedTuple):
    """A run with all that a process needs to do it."""

    run: Run
    target: TargetSpec
    ingredients: Ingredients
    settings: dict[str, Any]  # all that the record depends on, but for the weights
    out: Path  # of the record
    device: str = "cpu"


def execute(task: Task, progress: Callable[[Outcome], None]) -> Record:
    """Measure, and write the record; features are embedded and written before it, as it says that all is there."""
    code_commit()  # of the code that runs, whatever is checked out before it ends
    run = task.run
    model = load_model(task.ingredients.model, device=task.device, speed=run.speed)
    options = {"seed": run.seed, **run.options}
    choice = MethodChoice(model, run.method, run.preset, options, task.ingredients.statistics)
    prepared = Prepared(Measurement(choice, stream_choice(task), run.protocol, run.epochs))
    adapter = prepared.adapter(Console(file=io.StringIO()))
    record = prepared.measure(adapter, progress, notes={"run": task.settings})
    if run.features:
        images = ((arrival.images, arrival.labels) for arrival in prepared.stream)
        write_json(task.out.with_suffix(".tsne.json"), embedding(adapter, images, run.features, run.seed))
    record.save(task.out)
    return record


def stream_choice(task: Task) -> StreamChoice:
    """Describe the stream of a run: the images are those of the target whatever the seed, their order goes by it."""
    run, target = task.run, task.target
    names = () if run.domain is None else (run.domain,)
    made = bool(target.corruptions)
    return StreamChoice(
        data=task.ingredients.data,
        scenario=Scenario(batch=target.batch, seed=run.seed),
        split=target.split,
        corruptions=names if made else (),
        domains=() if made else names,
        severities=None if run.severity is None else (run.severity,),
        prefetch=target.prefetch,
        some=run.samples,
        corruption_seed=0,  # as in published files, which are the same for everybody
    )


def embedding(adapter: Adapter, batches: Iterator[tuple[Tensor, Tensor]], count: int, seed: int) -> dict[str, Any]:
    """Embed the features of the first `count` samples, as the adapted model sees them, in the plane by t-SNE."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError("features are embedded by scikit-learn: pip install 'ttac[report]'") from error
    features, labels = [], []
    for images, truth in batches:
        with torch.no_grad():
            found = adapter.classifier.eval().features(images.to(adapter.classifier.mean.device))
        features.append(found.float().cpu())
        labels.append(truth)
        if sum(map(len, labels)) >= count:
            break
    rows = torch.cat(features)[:count]
    points = TSNE(init="pca", perplexity=min(30, (len(rows) - 1) / 3), random_state=seed).fit_transform(rows.numpy())
    return {
        "format": POINTS,
        "points": [[round(float(x), 3), round(float(y), 3)] for x, y in points],
        "labels": torch.cat(labels)[:count].tolist(),
    }
