"""Memory layout and precision: the same weights and the same predictions, and refusals in time."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttac
from job_helpers import assert_refused
from ttac import Classifier, SourceStatistics
from ttac.adaptation.adapter import Adapter
from ttac.benchmark.experiment import Experiment, TargetSpec
from ttac.benchmark.runs import PlannedRun as Run
from ttac.cli import main
from ttac.evaluation.records import Record
from ttac.model import speed
from ttac.model.heads import HeadError
from ttac.model.networks import ResNet
from ttac.model.speed import Speed
from ttac.source.loading import ModelDescription, load_model, save_model

OPTIONS = [{"channels_last": True}, {"autocast": "bfloat16"}]
# Neither thresholds nor hard labels of an untrained network: rounding would decide on those.
SHORT = {"queue": 32, "passes": 2, "filter": "none", "self_train_weight": 0.0}
ONCE = {"queue": 0, "passes": 1, "filter": "none"}  # with self-training
STEADY = {**ONCE, "self_train_weight": 0.0}  # too few steps for rounding to grow
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@pytest.fixture(autouse=True)
def _quiet_about_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "bfloat16_in_hardware", lambda: True)


@pytest.fixture
def images() -> Tensor:
    """Images of unlike brightness, or batch norm would make all of them one."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(96, 3, 16, 16, generator=generator) * torch.linspace(0.2, 1, 96).reshape(-1, 1, 1, 1)


@pytest.fixture
def classifier() -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)  # no rectifier is within rounding of its kink, on whose other side a step is another one
        # As many channels as the longest vectors have numbers: see the strided convolutions of `ttac.model.speed`.
        return Classifier(ResNet(8, 10, width=16), mean=MEAN, std=STD).eval()


def adapter_of(classifier: Classifier, source: Classifier, images: Tensor, **options: Any) -> Adapter:
    """TTAC++ with the statistics of a source model, in which every sample counts."""
    stats = SourceStatistics.collect(source, [(images, torch.arange(len(images)) % 10)])
    return ttac.adapt(classifier, "ttac++", stats=stats, window=16, tau_pp=0.0, tau_st=0.0, **options)


def posteriors(adapter: Adapter, images: Tensor, batch: int = 16) -> Tensor:
    return torch.cat([adapter(part) for part in images.split(batch)]).softmax(1)


def difference(classifier: Classifier, source: Classifier, images: Tensor, **options: Any) -> float:
    """The largest difference of TTAC++'s posteriors over a stream with one classifier and with another."""
    expected = posteriors(adapter_of(source, source, images, **options), images)
    assert expected.std(0).max() > 0.001, "predictions that are all alike would prove nothing"
    return float((posteriors(adapter_of(classifier, source, images, **options), images) - expected).abs().max())


class TestTheSameWeights:
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_fingerprint_keys_and_statistics(self, classifier: Classifier, images: Tensor, options: Any) -> None:
        tuned = classifier.tuned(**options)
        assert tuned.fingerprint() == classifier.fingerprint()
        assert list(tuned.state_dict()) == list(classifier.state_dict())
        adapter = adapter_of(tuned, classifier, images, queue=0)
        assert adapter.classifier.speed == tuned.speed == Speed(**options)
        adapter.load_state_dict(adapter_of(classifier, classifier, images, queue=0).state_dict())

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_copies_keep_them(self, classifier: Classifier, options: Any) -> None:
        tuned = classifier.tuned(**options)
        for other in (tuned.copy(), copy.deepcopy(tuned), pickle.loads(pickle.dumps(tuned))):
            assert other.speed == tuned.speed
            assert other.head.weight is not tuned.head.weight
            assert other.model.conv1.weight.stride() == tuned.model.conv1.weight.stride()

    def test_the_original_is_left_alone(self, classifier: Classifier) -> None:
        tuned = classifier.tuned(channels_last=True)
        assert classifier.speed == Speed()
        assert classifier.model.conv1.weight.is_contiguous()
        assert tuned.model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


class TestTheSamePredictions:
    def test_channels_last(self, classifier: Classifier, images: Tensor) -> None:
        assert difference(classifier.tuned(channels_last=True), classifier, images, **STEADY) < 1e-4
        # Rounding sends rectifiers over their kinks, where a step is another one, and many steps make 0.01 of a
        # weight's last bit in float32: in float64 all of them can be compared.
        precise = Classifier(classifier.copy().model.double(), mean=MEAN, std=STD)
        for options in (SHORT, ONCE):
            assert difference(precise.tuned(channels_last=True), precise, images, **options) < 1e-9

    def test_autocast(self, classifier: Classifier, images: Tensor) -> None:
        """bfloat16 keeps 8 bits: a hundredth is what a few layers and steps make of that."""
        found = difference(classifier.tuned(autocast="bfloat16"), classifier, images, **STEADY)
        assert 1e-6 < found < 1e-2

    def test_autocast_keeps_all_but_the_pass_in_float32(self, classifier: Classifier, images: Tensor) -> None:
        tuned = classifier.tuned(autocast="bfloat16").train()
        inner: list[torch.dtype] = []
        tuned.head.register_forward_hook(lambda _module, _inputs, output: inner.append(output.dtype))
        features, logits = tuned.features_and_logits(images)
        assert (inner[0], inner[-1]) == (torch.float32, torch.bfloat16), "the head is verified in full precision first"
        assert features.dtype == logits.dtype == tuned(images).dtype == torch.float32
        assert {buffer.dtype for buffer in tuned.buffers()} == {torch.float32, torch.int64}
        logits.square().sum().backward()
        assert tuned.model.conv1.weight.grad.dtype == torch.float32

    def test_a_wrong_head_is_told_under_autocast_too(self, images: Tensor) -> None:
        class Scaled(nn.Sequential):
            def forward(self, pixels: Tensor) -> Tensor:
                return 1.03 * super().forward(pixels)

        tuned = Classifier(Scaled(nn.Flatten(), nn.Linear(768, 4)), head="1", mean=0, std=1).tuned(autocast="bfloat16")
        with pytest.raises(HeadError, match="is not the model's output"):
            tuned(images)

    def test_autocast_is_for_float32(self, classifier: Classifier) -> None:
        with pytest.raises(ValueError, match="autocast is for float32 weights"):
            classifier.copy().double().tuned(autocast="bfloat16")

    def test_a_network_may_write_to_its_input(self, images: Tensor) -> None:
        network = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(768, 4))
        shifted, before = images - 0.2, images - 0.2
        for classifier in (Classifier(network, mean=0, std=1), Classifier(network, mean=MEAN, std=STD)):
            adapter = ttac.adapt(classifier, "test")
            assert torch.equal(adapter.predict(shifted), adapter.predict(shifted))
        assert torch.equal(shifted, before)


class TestRefusals:
    @pytest.mark.parametrize("autocast", ["float16", torch.bfloat16, "auto"])
    def test_other_precisions(self, classifier: Classifier, autocast: Any) -> None:
        with pytest.raises(ValueError, match=r'autocast must be "bfloat16" or None, not .*float16 would need'):
            classifier.tuned(autocast=autocast)

    def test_convolutions_that_channels_last_would_spoil(self) -> None:
        with pytest.raises(ValueError, match=r"layer2\.0\.downsample\.0 is a 1 x 1 convolution with a stride and"):
            Classifier(ResNet(8, 10, width=4), mean=0, std=1).tuned(channels_last=True)

    @pytest.mark.parametrize(
        ("found", "expected"), [({"avx2": True}, False), ({"amx_bf16": True}, True), ({"bf16": False}, False)]
    )
    def test_bfloat16_without_instructions_warns(
        self, classifier: Classifier, monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], expected: bool
    ) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
        assert speed.bfloat16_in_hardware() is expected
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            classifier.tuned(autocast="bfloat16")
        assert ["has no bfloat16 instructions" in str(warning.message) for warning in caught] == [True] * (not expected)


class TestCommands:
    @pytest.fixture
    def model(self, tmp_path: Path) -> str:
        described = ModelDescription(
            "resnet8", 10, 1, size=(32, 32), arch_options={"width": 16, "stem_stride": 2}, mean=(0.0,), std=(1.0,)
        )
        save_model(tmp_path / "model.safetensors", ResNet(8, 10, channels=1, width=16, stem_stride=2), described)
        return str(tmp_path / "model.safetensors")

    def test_a_record_says_how_the_network_ran(
        self, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "record.json"
        command = ["evaluate", "--model", model, "--data", "digits", "--method", "bn", "--set", "window=16"]
        command += ["--samples", "32", "--out", str(out)]
        assert main([*command, "--channels-last", "--autocast", "bfloat16"]) == 0
        settings = Record.load(out).provenance["settings"]
        assert {name: settings[name] for name in ("channels_last", "autocast")} == {
            "channels_last": True,
            "autocast": "bfloat16",
        }
        assert_refused(command, out, "channels_last: True there, None now; autocast: bfloat16 there, None now", capsys)

    def test_load_model(self, model: str) -> None:
        assert load_model(model).classifier.speed == Speed()
        loaded = load_model(model, speed=Speed(channels_last=True))
        assert loaded.classifier.model.conv1.weight.is_contiguous(memory_format=torch.channels_last)

    def test_records_of_experiments_before_these_options_are_recognised(self) -> None:
        run = Run("name", "-", "row", "column", "test", "N-O-SF", "plain", "digits", None, None, 0)
        assert run.settings()["autocast"] is None
        assert Experiment("title", [], {}, {"digits": TargetSpec("digits")}).autocast is None
