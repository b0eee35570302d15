"""What is kept of the source domain: one Gaussian a class and one for all, collected or inferred."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ttac.common.lookup import pick, some
from ttac.common.options import Checked
from ttac.gaussian import FAMILIES, Gaussians, RunningGaussians, choose_family
from ttac.model.branches import ContrastiveBranch
from ttac.model.branches import fingerprint as branch_fingerprint
from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating
from ttac.model.inputs import check_labels
from ttac.model.tensors import read_tensors, write_tensors
from ttac.source.buffered import BufferedGaussians
from ttac.source.depths import DepthCollection
from ttac.source.infer import Parameterisation, anchors_around, has_signed_features, infer_means
from ttac.source.knowledge import Level, stored
from ttac.source.parts import DEPTHS, by_field, check_depths, read_parts, tensors_of

FORMAT = "ttac.statistics/1"
PARTS = ("classes", "overall", "projected")


@dataclass(frozen=True)
class Origin(Checked):
    """How statistics came to be."""

    how: Literal["collected", "inferred", "rescaled"]
    fingerprint: str  # of the classifier they belong to
    samples: int  # source samples seen; 0 where none were
    counts: tuple[int, ...]  # by class
    grouped_by: Literal["label", "prediction", "head"]
    branch: str | None = None  # fingerprint of the one whose projections were collected; not in older files

    def text(self) -> str:
        """Write the origin as JSON, without a branch as it was before there was the field: fingerprints go by it."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


@stored
@dataclass(frozen=True, eq=False)
class SourceStatistics:
    """Anchors of the source domain in feature space: `classes` (K Gaussians) and `overall` (one).

    `projected` is one Gaussian in the space of the contrastive branch, where the statistics were collected with one.
    `depths` are those of the channel vectors at all positions of the outputs of the network's blocks (`depth_names`),
    one each, and `floors` how far a window of 256 source images is from them by chance (`measure_floors`): both where
    they were collected.
    """

    kind: ClassVar[str] = "statistics"

    classes: Gaussians
    overall: Gaussians
    origin: Origin
    projected: Gaussians | None = None
    depths: Mapping[str, Gaussians] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Gaussians]:
        """The Gaussians that there are, by name."""
        found = {part: getattr(self, part) for part in PARTS}
        named = {part: gaussians for part, gaussians in found.items() if gaussians is not None}
        return named | {f"{DEPTHS}{name}": gaussians for name, gaussians in self.depths.items()}

    @property
    def level(self) -> Level:
        """What it takes to have these: source samples, or the weights alone."""
        return "free" if self.source_free else "light"

    def provenance(self) -> dict[str, Any]:
        """Say how they came about."""
        origin = {name: value for name, value in asdict(self.origin).items() if name != "counts"}
        families = {"class_family": self.classes.covariance.family, "overall_family": self.overall.covariance.family}
        if not self.depths:
            return {**origin, **families}
        kinds = {gaussians.covariance.family for gaussians in self.depths.values()}
        return {**origin, **families, "depths": len(self.depths), "depth_family": " and ".join(sorted(kinds))}

    def __repr__(self) -> str:
        classes, features = self.classes.mean.shape
        samples = f" from {self.origin.samples} samples" if self.origin.samples else ""
        return (
            f"SourceStatistics({self.origin.how}{samples}: {classes} classes, {features} features, "
            f"{self.classes.covariance.family})"
        )

    @property
    def source_free(self) -> bool:
        """Whether no source sample was needed."""
        return self.origin.how in ("inferred", "rescaled") and self.origin.samples == 0

    @classmethod
    def collect(
        cls,
        classifier: Classifier,
        loader: Iterable[Any],
        *,
        group_by: Literal["auto", "label", "prediction"] = "auto",
        family: str | None = None,
        rank: int | None = None,
    ) -> SourceStatistics:
        """Estimate the statistics in one streaming pass over `loader`, which yields images or (images, labels).

        Samples are grouped by label where the loader yields labels, else by the model's prediction (as the authors
        do). `family` is full, low-rank, diagonal or isotropic, and by default the richest that fits (`choose_family`).
        A second pass over some of the images, at most 2,048 that are kept meanwhile, measures the floors of the depths.
        """
        if family is not None:
            pick(family, FAMILIES, "family of Gaussians")
        dim = classifier.feature_dim
        classes, overall = (_buffered(n, dim, classifier, family, rank) for n in (classifier.num_classes, 1))
        branch = classifier.branch if isinstance(classifier.branch, ContrastiveBranch) else None
        projected = None if branch is None else _buffered(1, branch.projection.out_features, classifier, "full", rank)
        grouped: Literal["label", "prediction"] | None = None if group_by == "auto" else group_by
        depths: DepthCollection | None = None
        with evaluating(classifier), torch.no_grad():
            for item in loader:
                images, labels = _split(item)
                grouped = grouped or ("prediction" if labels is None else "label")
                if grouped == "label" and labels is None:
                    raise ValueError("grouping by label needs a loader that yields (images, labels)")
                images = classifier.check(images)
                if depths is None and len(images):
                    depths = DepthCollection(classifier, images, _statistics_dtype(classifier))
                with nullcontext() if depths is None else depths.taking(images):
                    features, logits = classifier.features_and_logits(images)
                features = features.to(_statistics_dtype(classifier))
                groups = logits.argmax(1) if grouped == "prediction" else check_labels(labels, *logits.shape)
                groups = groups.to(logits.device)
                everything = torch.zeros_like(groups)
                classes.add(features, groups)
                overall.add(features, everything)
                if branch is not None and projected is not None:
                    projections = branch(features.to(branch.hidden.weight.dtype)).to(features)
                    projected.add(projections, everything)
        finished = classes.finish()
        counts = tuple(int(count) for count in finished.counts)
        missing = [label for label, count in enumerate(counts) if count == 0]
        if grouped is None or missing:
            lack = f"no source sample of class {some(missing)} (grouped by {grouped})"
            raise ValueError(f"{lack}: every class needs an anchor")
        of_branch = None if branch is None else branch_fingerprint(branch)
        origin = Origin("collected", classifier.fingerprint(), sum(counts), counts, grouped, of_branch)
        projections_found = None if projected is None else projected.finish().gaussians
        anchors = {"classes": finished.gaussians, "overall": overall.finish().gaussians}
        found = ({}, {}) if depths is None else depths.finish(anchors)
        return cls(anchors["classes"], anchors["overall"], origin, projections_found, *found)

    @classmethod
    def infer(cls, classifier: Classifier, *, parameterisation: Parameterisation | None = None) -> SourceStatistics:
        """Infer the statistics from the head's weights alone.

        `parameterisation` of the means is "absolute" for features after a ReLU and "signed" for others, which a probe
        pass tells; "square" is the paper's text, see `infer_means`.
        """
        head = classifier.head
        if parameterisation is None:
            parameterisation = "signed" if has_signed_features(classifier) else "absolute"
        return cls._from_means(classifier, infer_means(head.weight, head.bias, parameterisation), "inferred")

    @classmethod
    def rescale_weights(cls, classifier: Classifier) -> SourceStatistics:
        """Take the head's weights, scaled to one norm, as class means: the ablation's baseline for `infer`."""
        weight = classifier.head.weight.detach().double()
        norms = weight.norm(dim=1, keepdim=True)
        zero = (norms.flatten() == 0).nonzero().flatten().tolist()
        if zero:
            lack = f"the head's weights of class {some(zero)} are all zero and have no direction to scale"
            raise ValueError(f"{lack}: infer or collect the statistics instead")
        return cls._from_means(classifier, weight / norms * norms.mean(), "rescaled")

    @classmethod
    def _from_means(
        cls, classifier: Classifier, means: Tensor, how: Literal["inferred", "rescaled"]
    ) -> SourceStatistics:
        dtype = _statistics_dtype(classifier)
        classes, overall = (
            part.map(lambda tensor: tensor.to(dtype) if tensor.ndim else tensor) for part in anchors_around(means)
        )
        origin = Origin(how, classifier.fingerprint(), 0, (0,) * classifier.num_classes, "head")
        return cls(classes, overall, origin)

    def to(self, device: torch.device) -> SourceStatistics:
        """Move the statistics to a device."""
        moved = {name: part.map(lambda tensor: tensor.to(device)) for name, part in self.parts.items()}
        return replace(self, **by_field(moved))

    def fingerprint(self) -> str:
        """Hash the statistics and their origin, the same on every device."""
        digest = hashlib.sha256(self.origin.text().encode())
        for part, gaussians in self.parts.items():
            # The names of the others are left out, as they were before there were depths.
            digest.update(part.encode() if part.startswith(DEPTHS) else b"")
            for tensor in (gaussians.mean, *gaussians.covariance.tensors().values()):
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
        digest.update(json.dumps(dict(self.floors)).encode() if self.floors else b"")
        return digest.hexdigest()[:32]

    def check(self, classifier: Classifier) -> None:
        """Raise an error unless these statistics belong to `classifier`."""
        num_classes, dim = self.classes.mean.shape
        if (num_classes, dim) != (classifier.num_classes, classifier.feature_dim):
            raise ValueError(
                f"the statistics have {num_classes} classes and {dim} features; "
                f"the classifier has {classifier.num_classes} and {classifier.feature_dim}"
            )
        fingerprint = classifier.fingerprint()
        if self.origin.fingerprint != fingerprint:
            raise ValueError(
                f"the statistics belong to the model {self.origin.fingerprint}, this one is {fingerprint}: "
                "collect or infer them again with this model"
            )
        modules = {name for name, _ in classifier.model.named_modules()}
        unknown = [name for name in self.depths if name not in modules]
        if unknown:
            raise ValueError(f"the statistics are of depths that the classifier does not have: {some(unknown)}")
        if self.projected is None or self.origin.branch is None or classifier.branch is None:
            return
        fingerprint = branch_fingerprint(classifier.branch)
        if self.origin.branch != fingerprint:
            raise ValueError(
                f"the statistics hold projections of the branch {self.origin.branch}, this one is {fingerprint}: "
                "collect them again with this model"
            )

    def save(self, path: Path | str) -> None:
        """Write a safetensors file, atomically."""
        families = {part: gaussians.covariance.family for part, gaussians in self.parts.items()}
        metadata = {"format": FORMAT, "families": json.dumps(families), "origin": self.origin.text()}
        if self.floors:
            metadata["floors"] = json.dumps(dict(self.floors))
        write_tensors(path, tensors_of(self.parts), metadata)

    @classmethod
    def load(cls, path: Path | str, classifier: Classifier | None = None) -> SourceStatistics:
        """Read a file that `save` wrote; with `classifier`, refuse one that belongs to another model."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no statistics file {path}")
        device = "cpu" if classifier is None else str(classifier.device)
        try:
            tensors, metadata = read_tensors(path, device)
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, expected {FORMAT!r}")
            origin, families = (json.loads(metadata[name]) for name in ("origin", "families"))
            origin = Origin(**{**origin, "counts": tuple(origin["counts"])})
            statistics = cls(
                origin=origin,
                floors=json.loads(metadata.get("floors", "{}")),
                **by_field(read_parts(tensors, families)),
            )
            check_depths(statistics.depths, statistics.floors)
            if statistics.overall.mean.shape != (1, statistics.classes.mean.shape[1]):
                raise ValueError("overall: expected one Gaussian over the features of the classes")
        # What a forged file makes torch raise: indices, shapes and numbers out of range.
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{path} is not a readable statistics file: {error}") from error
        if classifier is not None:
            statistics.check(classifier)
        return statistics


def _statistics_dtype(classifier: Classifier) -> torch.dtype:
    """Half-precision features are accumulated in float32."""
    return torch.float64 if classifier.dtype == torch.float64 else torch.float32


def _buffered(count: int, dim: int, classifier: Classifier, family: str | None, rank: int | None) -> BufferedGaussians:
    """Make Gaussians that no sample has come to yet, of a family or of the richest that fits."""
    chosen, fitting = choose_family(count, dim)
    kind: dict[str, Any] = {"family": family or chosen, "rank": fitting if rank is None else rank}
    dtype, device = _statistics_dtype(classifier), classifier.device
    return BufferedGaussians(RunningGaussians.empty(count, dim, dtype=dtype, device=device, **kind))


def _split(item: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(item, Tensor):
        return item, None
    if isinstance(item, list | tuple) and 1 <= len(item) <= 2:
        return item[0], (item[1] if len(item) == 2 else None)
    raise TypeError(f"the loader yields {type(item).__name__}; expected images or (images, labels)")
