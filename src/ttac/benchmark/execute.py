"""One run, from its files to its record."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ttac.adaptation.adapter import Adapter
from ttac.benchmark.executor import Task
from ttac.benchmark.report.results import POINTS_FORMAT
from ttac.common.environment import code_commit
from ttac.evaluation.engine import Outcome
from ttac.evaluation.loggers import open_loggers
from ttac.evaluation.prepare import PreparedRun
from ttac.evaluation.records import Record
from ttac.evaluation.spec import MethodSpec, ModelSpec, RunSpec, StreamSpec

Report = Callable[[int, float | None], None]  # takes the samples so far and their error


def execute(task: Task, report: Report) -> tuple[Record, dict[str, Any] | None]:
    """Measure, and give the record with the features as t-SNE lays them out, None where the run asks for none."""
    code_commit()  # of the code that runs, whatever is checked out before it ends
    run = task.run
    model = ModelSpec(task.files.model, device=task.device, channels_last=run.channels_last, autocast=run.autocast)
    method = MethodSpec(run.method, run.preset, run.options, task.files.statistics)
    prepared = PreparedRun(RunSpec(model, method, stream_spec(task), run.protocol, run.epochs))
    adapter = prepared.method.adapter(Console(file=io.StringIO()))
    callbacks = open_loggers(task.log, f"{task.settings['experiment']}/{task.settings['scale']}/{run.name}")

    def tell(outcome: Outcome) -> None:
        report(outcome.samples, outcome.error)

    record = prepared.evaluate(adapter, tell, {"run": task.settings}, callbacks)
    if not run.features:
        return record, None
    images = ((arrival.images, arrival.labels) for arrival in prepared.stream)
    return record, embedding(adapter, images, run.features, run.seed)


def stream_spec(task: Task) -> StreamSpec:
    """Describe the stream of a run: the images are those of the target whatever the seed, their order goes by it."""
    run, target = task.run, task.target
    names = () if run.domain is None else (run.domain,)
    made = bool(target.corruptions)
    return StreamSpec(
        data=task.files.data,
        split=target.split,
        corruption=names if made else (),
        domain=() if made else names,
        severity=None if run.severity is None else (run.severity,),
        batch=target.batch,
        seed=run.seed,
        prefetch=target.prefetch,
        some=run.samples,
        corruption_seed=0,  # as in published files, which are the same for everybody
        strength=None if target.strength is None else tuple(target.strength),
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
        "format": POINTS_FORMAT,
        "points": [[round(float(x), 3), round(float(y), 3)] for x, y in points],
        "labels": torch.cat(labels)[:count].tolist(),
    }
