"""What Prometheus sees of a service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ttac.serving.batcher import Batcher
from ttac.serving.protocol import ServedModel

# One time series a class is too many for a thousand of them.
MOST_CLASSES = 100
SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics(Collector):
    """Counts requests and predictions here, and reads the rest from the batcher and from `status` when it is asked.

    A number of the status that is not known is left out.
    """

    def __init__(self, model: ServedModel, batcher: Batcher, status: Callable[[], Mapping[str, Any]]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("ttac_requests", "Requests", ["route", "status"], registry=self._registry)
        self._seconds = Histogram(
            "ttac_request_seconds", "Time to answer a request", ["route"], buckets=SECONDS, registry=self._registry
        )
        self._images = Counter("ttac_images", "Images that got a prediction", registry=self._registry)
        self._confidence = Counter(
            "ttac_confidence", "Sum of the confidences; divide by ttac_images_total", registry=self._registry
        )
        self._predicted: list[Counter] = []
        if model.num_classes <= MOST_CLASSES:
            predicted = Counter("ttac_predicted", "Predictions by class", ["class"], registry=self._registry)
            self._predicted = [predicted.labels(name) for name in model.labels]
        self._batcher = batcher
        self._status = status
        self._registry.register(self)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Note an answer; `route` is the pattern, as addresses are without number."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def predictions(self, labels: NDArray[np.int64], confidence: float) -> None:
        """Note predicted classes `[n]` and the sum of their probabilities."""
        self._images.inc(len(labels))
        self._confidence.inc(confidence)
        if self._predicted:
            for label in labels.tolist():
                self._predicted[label].inc()

    def text(self) -> bytes:
        """Give all of it in the text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Say nothing when it is registered: there may be no status yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Read the batcher and the status once."""
        yield _passes(list(self._batcher.passes))
        yield GaugeMetricFamily("ttac_waiting_images", "Images that wait for a pass", self._batcher.waiting)
        status = self._status()
        for family, sources in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, path in sources:
                if (value := _number(status, path)) is not None:
                    yield family(name, text, value)
        yield _measures(status)


_Source = tuple[str, str, tuple[str, ...]]  # name, help, path into the status
_GAUGES: tuple[_Source, ...] = (
    ("ttac_weights_version", "Version of the weights that answer", ("predictor", "version")),
    ("ttac_weights_age_seconds", "Time since these weights were published", ("predictor", "weights_age_seconds")),
    ("ttac_adapter_up", "Whether the adapter runs", ("adapter", "up")),
    ("ttac_adapter_lag_samples", "Samples that the adapter has still to see", ("adapter", "lag")),
    ("ttac_guard_ok", "Whether the guard lets new weights out", ("guard", "ok")),
)
_SINCE_START = ("adapter", "since_start")
_COUNTERS: tuple[_Source, ...] = (
    ("ttac_samples_dropped", "Samples that the adapter never saw", ("adapter", "dropped")),
    ("ttac_predictor_restarts", "Times that the predictor was started again", ("predictor", "restarts")),
    ("ttac_adapter_restarts", "Times that the adapter was started again", ("adapter", "restarts")),
    # Since its process began: its other counts go back with it to a snapshot, which a counter must not do.
    ("ttac_samples_learned", "Samples that the adapter has seen", (*_SINCE_START, "samples")),
    ("ttac_samples_refused", "Samples that the guard kept from the adapter", (*_SINCE_START, "refused_samples")),
    ("ttac_bad_samples", "Samples that the adapter failed on", (*_SINCE_START, "bad_samples")),
    ("ttac_updates", "Updates of the adapting model", (*_SINCE_START, "updates")),
    ("ttac_guard_trips", "Updates that the guard did not let out", (*_SINCE_START, "guard_refusals")),
    ("ttac_rollbacks", "Returns to earlier weights", (*_SINCE_START, "rollbacks")),
    ("ttac_resets", "Returns to the weights of the source", (*_SINCE_START, "resets")),
    ("ttac_publishes", "Versions that were published", (*_SINCE_START, "publishes")),
)


def _passes(passes: list[int]) -> Metric:
    """Give how many images passes had, from how many passes there were of each number."""
    bounds = sorted({min(2**power, len(passes) - 1) for power in range(len(passes).bit_length())})
    buckets = [(str(float(bound)), float(sum(passes[: bound + 1]))) for bound in bounds]
    images = float(sum(size * count for size, count in enumerate(passes)))
    sizes = HistogramMetricFamily("ttac_batch_images", "Images of a pass through the model")
    sizes.add_metric([], [*buckets, ("+Inf", float(sum(passes)))], images)
    return sizes


def _measures(status: Mapping[str, Any]) -> Metric:
    """Give what the guard measured of the adapting model and of the source model."""
    family = GaugeMetricFamily("ttac_guard_measure", "What the guard sees", labels=["measure", "of"])
    for measure, values in status.get("guard", {}).get("measures", {}).items():
        for kind in ("adapted", "source", "limit"):
            if (value := _number(values, (kind,))) is not None:
                family.add_metric([measure, kind], value)
    return family


def _number(status: Any, path: tuple[str, ...]) -> float | None:
    for name in path:
        status = status.get(name) if isinstance(status, Mapping) else None
    return float(status) if isinstance(status, int | float) else None
