"""From specs to what runs: a loaded model with its method, on a stream that is found, under a protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ttac.adaptation.adapter import Adapter
from ttac.common.files import text_hash
from ttac.common.options import check_value, checked_fields, read_value
from ttac.common.resumable import plain_settings
from ttac.data.streams import Stream
from ttac.evaluation.engine import Outcome, evaluate
from ttac.evaluation.loggers import Callback
from ttac.evaluation.protocols import Protocol, check_epochs, check_protocol, get_protocol
from ttac.evaluation.records import Record
from ttac.evaluation.spec import MethodSpec, RunSpec
from ttac.methods.registry import adapt, find_method
from ttac.model.weights import LoadedModel, check_size
from ttac.source.bundle import Bundle
from ttac.source.knowledge import by_kind
from ttac.source.statistics import SourceStatistics


def read_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the words of a command line as the types of the method's options; unknown names are left to `adapt`.

    >>> read_options("bn", {"window": "64"})
    {'window': 64}
    """
    known = {field.name: (field, kind) for field, kind in checked_fields(find_method(method).options_type)}
    read = dict(options)
    for name in [name for name in options if name in known]:
        field, kind = known[name]
        read[name] = read_value(options[name], kind)
        check_value(f"--set {name}", read[name], kind, field.metadata.get("limits", {}))
    return read


class PreparedMethod:
    """A method on a loaded model, with the options that follow from what the model's bundle knows of its training.

    `defaults` are options that the spec may override. Under a protocol that is source-free, statistics that were
    collected from source images stay in the bundle.
    """

    def __init__(
        self,
        spec: MethodSpec,
        model: LoadedModel,
        *,
        defaults: Mapping[str, Any] | None = None,
        protocol: Protocol | None = None,
        guard: bool = False,
    ) -> None:
        method = find_method(spec.method)
        self.spec, self.model, self.protocol = spec, model, protocol
        self.options = {**(defaults or {}), **read_options(spec.method, spec.options)}
        self._known = [one for one in model.knowledge if one.kind != "statistics"] if isinstance(model, Bundle) else []
        given = {**method.presets.get(spec.preset or "", {}), **self.options}
        informed = method.informed(given, by_kind(self._known))
        self._told = {name: value for name, value in informed.items() if name not in given}
        self.options |= self._told
        self._asked_guard, self.guard = guard, guard and method.guardable
        self._needs_statistics = "statistics" in method.capabilities.needs
        self._bundled: SourceStatistics | None = None
        if isinstance(model, Bundle):
            allowed = protocol is None or protocol.source == "light"
            wanted = self._needs_statistics or self.guard
            if wanted and model.statistics is not None and (allowed or model.statistics.source_free):
                self._bundled = model.statistics

    def settings(self) -> dict[str, Any]:
        """Name all that the adapter depends on."""
        return {
            "model": self.model.classifier.fingerprint(),
            "statistics": self._statistics_hash(),
            "method": self.spec.method,
            "preset": self.spec.preset,
            "options": dict(self.options),
            "device": str(self.model.classifier.device),
            "guard": self.guard or None,  # None as in records that were made before there was one
        }

    def adapter(self, console: Console, keep: Path | None = None) -> Adapter:
        """Make the adapter, and say how the model was read, and which options and statistics nobody has named.

        Raises an error where the protocol does not allow it. Statistics that have to be inferred are kept in the file
        `keep`, and read from there the next time.
        """
        self.model.tell(console)
        if self._told:
            named = ", ".join(f"{name} is {value}" for name, value in self._told.items())
            console.print(f"{named}, as the bundle was trained", markup=False)
        if self._asked_guard and not self.guard:
            console.print(f"no guard: {self.spec.method} has confidences of its own", markup=False)
        return self._adapter(self._statistics(console, keep))

    def _adapter(self, stats: SourceStatistics | None) -> Adapter:
        classifier, spec = self.model.classifier, self.spec
        given: dict[str, Any] = {"preset": spec.preset, "guard": self.guard, **self.options}
        adapter = adapt(classifier, spec.method, stats=stats, knowledge=self._known, **given)
        if self.protocol is not None:
            check_protocol(adapter, self.protocol)
        return adapter

    def _statistics(self, console: Console, keep: Path | None) -> SourceStatistics | None:
        """Read the statistics, take those of the bundle or infer them; None where none are needed."""
        classifier = self.model.classifier
        if self.spec.stats is not None:
            return SourceStatistics.load(self.spec.stats, classifier)
        if not self._needs_statistics:
            return self._bundled  # for the guard
        if self._bundled is not None:
            how = (
                "inferred from the head's weights (source-free)"
                if self._bundled.source_free
                else f"collected from {self._bundled.origin.samples} source images (source-light)"
            )
            console.print(f"no --stats: anchors are those of the bundle, {how}", markup=False)
            return self._bundled
        if keep is not None and keep.exists():
            return SourceStatistics.load(keep, classifier)
        # Anchors that cost nothing, so that a mistake in the options shows before minutes go into better ones.
        if bool(classifier.head.weight.any(1).all()):  # others cannot be rescaled, such as those that T3A leaves
            self._adapter(SourceStatistics.rescale_weights(classifier))
        console.print("no --stats: anchors are inferred from the head's weights (source-free)", markup=False)
        inferred = SourceStatistics.infer(classifier)
        if keep is not None:
            inferred.save(keep)
        return inferred

    def _statistics_hash(self) -> str | None:
        file = self.spec.stats
        if file is None:
            return None if self._bundled is None else self._bundled.fingerprint()
        if not file.is_file():
            raise FileNotFoundError(f"no statistics file {file}")
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


class PreparedRun:
    """A run whose model is loaded and whose data are found; nothing has been learned or predicted yet."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.protocol = spec, get_protocol(spec.protocol)
        check_epochs(self.protocol, spec.epochs)
        find_method(spec.method.method)  # first: its file may define knowledge that the model's bundle keeps
        spec.stream.plan()  # what contradicts itself there is told before a model is loaded
        self.model = spec.model.load()
        seed = {"seed": spec.stream.seed}
        self.method = PreparedMethod(spec.method, self.model, defaults=seed, protocol=self.protocol, guard=spec.guard)
        self.stream = spec.stream.build(self.model.description)
        check_size(self.model.classifier, self.stream.image_shape[1:])
        adapted = {**self.method.settings(), **self.model.classifier.speed.settings()}
        walked = stream_settings(self.stream, self.model.description.classes)
        self.settings = plain_settings({**adapted, "protocol": spec.protocol, "epochs": spec.epochs, **walked})

    def evaluate(
        self,
        adapter: Adapter,
        progress: Callable[[Outcome], None],
        notes: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Record:
        """Walk the stream; `notes` go into the provenance."""
        known = {"data": self.spec.stream.data, "settings": self.settings, **(notes or {})}
        return evaluate(
            adapter, self.stream, self.protocol,
            epochs=self.spec.epochs, progress=progress, callbacks=callbacks, notes=known,
        )  # fmt: skip


def stream_settings(stream: Stream, classes: tuple[str, ...] | None) -> dict[str, Any]:
    """Name the stream, and the classes in whose order the labels of a named data set are put."""
    described = stream.describe()
    return {
        **described["scenario"],
        "domains": list(stream.domains),
        "data": text_hash([domain["data"] for domain in described["domains"]]),
        "classes": classes_hash(classes),
    }


def classes_hash(classes: tuple[str, ...] | None) -> str | None:
    """Give a text that differs where class names or their order do, None where there are no names."""
    return None if classes is None else text_hash([ascii(name) for name in classes])
