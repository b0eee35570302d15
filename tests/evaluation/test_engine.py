"""The engine: its numbers against a plain loop, and what it refuses before it starts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ttac
from ttac import Classifier, Record, SourceStatistics, checks
from ttac.data.labelled import from_tensors
from ttac.data.streams import Domain, Scenario, Stream
from ttac.evaluation.metrics import PeakMemory
from ttac.evaluation.protocols import PROTOCOLS, Protocol


def stream(subject: checks.Subject, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (len(subject.images),), generator=generator)
    return list(zip(subject.images.split(size), labels.split(size), strict=True))


def test_record_equals_a_plain_loop(tmp_path: Path) -> None:
    subject = checks.subject("ttac++")
    data = stream(subject)
    record = ttac.evaluate(subject.make(), data, protocol="N-O-SL", notes={"domain": "noise"})
    adapter = subject.make()
    predictions = torch.cat([adapter(images).argmax(1) for images, _ in data])
    labels = torch.cat([truth for _, truth in data])
    wrong = predictions != labels
    assert record.samples == 44
    assert record.error == pytest.approx(100 * wrong.float().mean().item())
    for count, error in record.cumulative_error:
        assert error == pytest.approx(100 * wrong[:count].float().mean().item())
    for k, error in enumerate(record.class_error):
        assert error == pytest.approx(100 * wrong[labels == k].float().mean().item())
    assert record.latency_ms["update"]["count"] == 5
    assert record.latency_ms["predict"]["count"] == 6
    assert 0 < record.latency_ms["update"]["p50"] <= record.latency_ms["update"]["p99"]
    assert record.counters == adapter.counters()
    assert record.counters["skipped_steps"] == 0
    assert record.peak_memory_mib > record.adapter_memory_mib > 0
    made = record.provenance
    assert (made["protocol"], made["predict"], made["domain"], made["reset"]) == ("N-O-SL", "after", "noise", "fresh")
    assert made["model"] == adapter.source_fingerprint
    assert made["options"]["window"] == 8
    assert made["arrival_batch_sizes"] == [4, 8]
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record
    (tmp_path / "other.json").write_text(json.dumps({"format": "else"}))
    with pytest.raises(ValueError, match=r"other.json is not a record"):
        Record.load(tmp_path / "other.json")


def test_a_record_says_that_the_adapter_had_seen_samples_before() -> None:
    subject = checks.subject("bn")
    adapter = subject.make()
    ttac.evaluate(adapter, stream(subject), protocol="N-O-SF")
    with pytest.raises(ValueError, match="has already seen 44 samples"):
        ttac.evaluate(adapter, stream(subject), protocol="N-O-SF")
    record = ttac.evaluate(adapter, stream(subject), protocol="N-O-SF", continuing=True)
    assert record.provenance["samples_before"] == 44
    assert record.provenance["reset"].startswith("none")


def test_protocols_are_the_six_of_the_paper() -> None:
    assert list(PROTOCOLS) == ["N-O-SF", "N-O-SL", "Y-O-SL", "N-M-SF", "N-M-SL", "Y-M-SL"]
    with pytest.raises(AttributeError):
        PROTOCOLS["N-O-SF"].source = "light"  # type: ignore[misc]


def test_more_than_the_protocol_allows_is_refused_before_anything_is_read(tiny_classifier: Classifier) -> None:
    def never() -> object:
        raise AssertionError("the stream was read")
        yield

    images = torch.rand(20, 3, 16, 16)
    collected = SourceStatistics.collect(tiny_classifier, [(images, torch.arange(20) % 10)])
    adapter = ttac.adapt(tiny_classifier, "ttac++", stats=collected)
    with pytest.raises(ValueError, match="source-free, and this TTAC\\+\\+ holds statistics collected from source"):
        ttac.evaluate(adapter, never(), protocol="N-O-SF")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown protocol 'N-O'; choose from N-O-SF"):
        ttac.evaluate(adapter, never(), protocol="N-O")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="BN is not defined under N-O-SL"):
        ttac.evaluate(ttac.adapt(tiny_classifier, "bn"), never(), protocol="N-O-SL")  # type: ignore[arg-type]
    forged = Protocol("N-O-SF", modified_objective=False, passes="one", source="light")
    with pytest.raises(ValueError, match="none of the six protocols"):
        ttac.evaluate(adapter, never(), protocol=forged)  # type: ignore[arg-type]
    inferred = ttac.adapt(tiny_classifier, "ttac++", stats=SourceStatistics.infer(tiny_classifier))
    with pytest.raises(AssertionError, match="the stream was read"):  # allowed, so it starts
        ttac.evaluate(inferred, never(), protocol="N-O-SF")  # type: ignore[arg-type]


def test_bad_streams_are_refused_and_change_nothing() -> None:
    subject = checks.subject("ttac++")
    adapter = subject.make()
    before = adapter.state_dict()
    images = subject.images[:4]
    for item, message in (
        ((images, torch.tensor([0, 1])), "expected integers of shape \\(4,\\)"),
        ((images, torch.tensor([0, 1, 2, 9])), r"labels must be in 0..3; got 0..9"),
        ((images, torch.zeros(4)), "expected integers"),
        (images, "the stream yields Tensor"),
        ((images[:0], torch.zeros(0).long()), "the batch is empty"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            ttac.evaluate(adapter, [item], protocol="N-O-SL")  # type: ignore[list-item]
        assert checks._same(adapter.state_dict(), before)
    with pytest.raises(ValueError, match="the stream is empty"):
        ttac.evaluate(adapter, [], protocol="N-O-SL")


def test_progress_is_told_the_error_so_far() -> None:
    subject = checks.subject("test")
    told = []
    record = ttac.evaluate(subject.make(), stream(subject), protocol="N-O-SF", progress=told.append)
    assert [outcome.samples for outcome in told] == [8, 16, 24, 32, 40, 44]
    assert told[-1].error == record.error


def marked(subject: checks.Subject, scenario: Scenario) -> Stream:
    """Three domains of the subject's images, and clean ones."""
    pixels = (255 * subject.images).round().byte()
    labels = torch.randint(0, 4, (len(pixels),), generator=torch.Generator().manual_seed(0))
    shades = [from_tensors(pixels // shade, labels, 4) for shade in (1, 2, 3, 4)]
    return Stream([Domain("fog", shades[n], n) for n in (3, 1, 2)], scenario, clean=shades[0])


@pytest.mark.parametrize("protocol", ["N-O-SF", "N-M-SF"])
@pytest.mark.parametrize("sequence", ["continual", "gradual", "mixed"])
def test_errors_of_domains_and_segments_are_those_of_a_plain_loop(sequence: str, protocol: str, tmp_path: Path) -> None:
    subject = checks.subject("tent")
    stream = marked(subject, Scenario(sequence, interlude=9, batch=10, samples=40))  # type: ignore[arg-type]
    epochs = {"epochs": 2} if protocol == "N-M-SF" else {}
    record = ttac.evaluate(subject.make(), stream, protocol, notes={"stream": "a lie"}, **epochs)
    by_hand = subject.make()
    for _ in range(epochs.get("epochs", 0)):
        for images, _, _ in stream:
            by_hand.learn(images)
    answer = by_hand.predict if epochs else by_hand
    wrong, marks = [], []
    for images, labels, domains in stream:
        wrong += (answer(images).argmax(1) != labels).tolist()
        marks += [stream.domains[number] for number in domains.tolist()]
    assert list(record.domain_error) == list(dict.fromkeys(marks))
    for name, found in record.domain_error.items():
        own = [miss for miss, mark in zip(wrong, marks, strict=True) if mark == name]
        assert found == {"samples": len(own), "error": pytest.approx(100 * sum(own) / len(own))}
    start = 0
    for (name, samples, error), segment in zip(record.segments, stream.segments, strict=True):
        assert (name, samples) == segment
        assert error == pytest.approx(100 * sum(wrong[start : start + samples]) / samples)
        start += samples
    assert start == record.samples == len(stream)
    assert record.error == pytest.approx(100 * sum(wrong) / len(wrong))
    assert record.provenance["stream"] == stream.describe()
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record


def test_arrivals_count_without_their_stream_and_have_no_names_then() -> None:
    subject = checks.subject("test")
    stream = marked(subject, Scenario("continual"))
    record = ttac.evaluate(subject.make(), list(stream), "N-O-SF")
    assert record.error == ttac.evaluate(subject.make(), stream, "N-O-SF").error
    assert (record.domain_error, record.segments) == ({}, [])
    assert "stream" not in record.provenance


def test_a_method_gets_images_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = checks.subject("bn")
    adapter = subject.make()
    given: list[tuple[object, ...]] = []
    arrive = type(adapter).__call__

    def note(self: object, *arguments: object) -> torch.Tensor:
        given.append(arguments)
        return arrive(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(adapter), "__call__", note)
    stream = marked(subject, Scenario("mixed"))
    ttac.evaluate(adapter, stream, "N-O-SF")
    expected = [images for images, _, _ in stream]
    assert len(given) == len(expected)
    for (images,), wanted in zip(given, expected, strict=True):
        assert type(images) is torch.Tensor
        assert torch.equal(images, wanted)


def test_records_of_before_domains_are_still_read(tmp_path: Path) -> None:
    subject = checks.subject("test")
    record = ttac.evaluate(subject.make(), stream(subject), "N-O-SF")
    content = dataclasses.asdict(record)
    del content["domain_error"], content["segments"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert Record.load(tmp_path / "old.json") == record
    committed = Path(__file__).parents[2] / "results"
    for name in ("severities/test.json", "serve/source.json"):  # of before losses and measures, too
        assert Record.load(committed / name).samples


def test_peak_memory_sees_a_peak() -> None:
    meter = PeakMemory(torch.device("cpu"))
    before = meter.compute()
    torch.ones(64 * 2**20)  # 256 MiB
    assert meter.compute() > before + 200


def test_public_names_are_the_documented_ones_and_lazy() -> None:
    names = {"Classifier", "load_model", "zero_shot", "SourceStatistics", "adapt", "evaluate", "PROTOCOLS", "Record"}
    names |= {"checks"}
    assert set(ttac.__all__) == names
    assert all(getattr(ttac, name) is not None for name in names)
    with pytest.raises(AttributeError, match="public names: Classifier"):
        ttac.adaptt  # noqa: B018
    code = "import sys, ttac; assert 'torch' not in sys.modules; ttac.Classifier; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
