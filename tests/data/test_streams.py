"""Plans of streams against their definitions: which samples come, in which order, and from which domain."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ttac.data.corruptions import Corruption
from ttac.data.labelled import LabelledImages, from_tensors
from ttac.data.streams import Domain, Scenario, Stream, corrupted_domains

CLASSES = 10
Sample = tuple[int, int, int]  # domain, row, label


def images_of(labels: Tensor, domain: int = 0) -> LabelledImages:
    """Images whose pixels say which row of which domain they are."""
    rows = torch.arange(len(labels))
    pixels = torch.stack([rows % 256, rows // 256, torch.full_like(rows, domain)], 1)
    return from_tensors(pixels.byte()[:, :, None, None].repeat(1, 1, 8, 8), labels, CLASSES)


def some_labels(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def some_domains(count: int, samples: int = 90) -> list[Domain]:
    return [Domain(f"d{number}", images_of(some_labels(samples), number)) for number in range(count)]


def levels(name: str, severities: list[int], first: int = 0, samples: int = 100) -> list[Domain]:
    return [Domain(name, images_of(some_labels(samples), first + n), s) for n, s in enumerate(severities)]


def walk(stream: Stream) -> list[Sample]:
    """Read a stream's samples off its pixels, and check what comes beside them."""
    found: list[Sample] = []
    for images, labels, domains in stream:
        assert images.dtype == torch.float32
        assert len(images) == len(labels) == len(domains) <= stream.scenario.batch
        pixels = (255 * images[:, :, 0, 0]).round().long()
        assert torch.equal(domains, pixels[:, 2])
        found += zip(domains.tolist(), (pixels[:, 0] + 256 * pixels[:, 1]).tolist(), labels.tolist(), strict=True)
    assert len(found) == len(stream)
    assert sum(samples for _, samples in stream.segments) == len(stream)
    return found


def rows_of(samples: list[Sample], domain: int) -> list[int]:
    return [row for number, row, _ in samples if number == domain]


def test_a_single_domain_comes_once_in_an_order_of_the_seed() -> None:
    [domain] = some_domains(1, 300)
    stream = Stream([domain], Scenario(batch=64))
    assert [len(labels) for _, labels, _ in stream] == [64, 64, 64, 64, 44]
    samples = walk(stream)
    assert sorted(samples) == [(0, row, label) for row, label in enumerate(domain.images.labels.tolist())]
    assert samples != sorted(samples)
    assert walk(stream) == samples == walk(Stream([domain], Scenario(batch=7), prefetch=0))
    assert walk(Stream([domain], Scenario(seed=1))) != samples
    assert walk(Stream([domain], Scenario(order="given"))) == sorted(samples)


def test_some_samples_are_the_same_in_every_domain_and_order() -> None:
    domains = some_domains(3)
    scenario = Scenario("continual", samples=40)
    samples = walk(Stream(domains, scenario))
    chosen = [rows_of(samples, number) for number in range(3)]
    assert all(len(set(rows)) == len(rows) == 40 for rows in chosen)
    assert sorted(chosen[0]) == sorted(chosen[1]) == sorted(chosen[2])
    assert chosen[0] != chosen[1]  # the orders differ
    given = rows_of(walk(Stream(domains, replace(scenario, order="given"))), 1)
    assert given == sorted(chosen[1])
    assert sorted(rows_of(walk(Stream(domains, replace(scenario, seed=1))), 0)) != sorted(chosen[0])


def test_continual_domains_come_one_after_another() -> None:
    stream = Stream(some_domains(3), Scenario("continual", batch=32))
    samples = walk(stream)
    assert [number for number, _, _ in samples] == [0] * 90 + [1] * 90 + [2] * 90
    assert all(sorted(rows_of(samples, number)) == list(range(90)) for number in range(3))
    assert stream.segments == (("d0", 90), ("d1", 90), ("d2", 90))
    assert walk(Stream(some_domains(4), Scenario("continual")))[:270] == samples  # what comes later changes nothing


def test_mixed_domains_are_interleaved() -> None:
    stream = Stream(some_domains(4), Scenario("mixed"))
    samples = walk(stream)
    assert sorted((number, row) for number, row, _ in samples) == [(n, row) for n in range(4) for row in range(90)]
    assert stream.segments == (("mixed", 360),)
    for half in (samples[:180], samples[180:]):
        counts = Counter(number for number, _, _ in half)
        assert all(abs(counts[number] - 45) < 20 for number in range(4))  # hypergeometric, sd 4.1
    changes = sum(one[0] != other[0] for one, other in pairwise(samples))
    assert abs(changes - 0.75 * 359) < 40  # sd 8


def test_gradual_severities_go_up_and_down_and_share_the_samples_out() -> None:
    domains = [*levels("a", [3, 1, 5, 2, 4]), *levels("b", [5, 2], first=5)]
    stream = Stream(domains, Scenario("gradual"))
    names = [name for name, _ in stream.segments]
    assert names == [f"a {s}" for s in (1, 2, 3, 4, 5, 4, 3, 2, 1)] + ["b 2", "b 5", "b 2"]
    assert {count for name, count in stream.segments if name[0] == "a"} == {11, 12}
    samples = walk(stream)
    marks = [stream.domains[number] for number, _, _ in samples]
    assert marks == [name for name, count in stream.segments for _ in range(count)]
    assert sorted(row for _, row, _ in samples[:100]) == sorted(row for _, row, _ in samples[100:]) == list(range(100))
    assert sorted(row for _, row, _ in samples[:12]) != list(range(12))
    in_order = walk(Stream(domains, Scenario("gradual", order="given")))
    assert [row for _, row, _ in in_order[:100]] == list(range(100))


@pytest.mark.parametrize("sequence", ["continual", "gradual", "mixed"])
def test_interludes_show_clean_samples_after_each_domain(sequence: str) -> None:
    domains = [*levels("a", [1, 2, 3]), *levels("b", [1, 2, 3], first=3), *levels("c", [1, 2], first=6)]
    clean = images_of(some_labels(20), 8)
    scenario = Scenario(sequence, interlude=8)  # type: ignore[arg-type]
    stream = Stream(domains, scenario, clean=clean)
    names = [name for name, _ in stream.segments]
    if sequence == "continual":
        assert names == [name for mark in stream.domains[:-1] for name in (mark, "clean")]
    elif sequence == "mixed":
        assert names == ["mixed", "clean"]
    else:
        ups = [["a 1", "a 2", "a 3", "a 2", "a 1"], ["b 1", "b 2", "b 3", "b 2", "b 1"], ["c 1", "c 2", "c 1"]]
        assert names == [name for up in ups for name in (*up, "clean")]
    samples = walk(stream)
    assert stream.domains[-1] == "clean"
    without = walk(Stream(domains, replace(scenario, interlude=0)))
    assert [sample for sample in samples if sample[0] != 8] == without
    shown = rows_of(samples, 8)
    assert len(shown) == 8 * names.count("clean")
    for start in range(0, len(shown), 20):  # all of them come before one comes again, in the same order
        assert shown[start : start + 20] == shown[: len(shown[start : start + 20])]
    assert len(set(shown)) == min(len(shown), 20)


# Label correlation


def entropies(labels: list[int], size: int) -> float:
    """The mean entropy of the classes in consecutive parts."""
    found = []
    for start in range(0, len(labels) - size + 1, size):
        share = np.bincount(labels[start : start + size], minlength=CLASSES) / size
        share = share[share > 0]
        found.append(-(share * np.log(share)).sum())
    return float(np.mean(found))


def naive_correlation(labels: list[int], concentration: float, random: np.random.Generator) -> list[int]:
    """Labels in the order of RoTTA's benchmark, written as plainly as can be: gamma draws, one sample at a time."""
    slots: list[dict[int, int]] = [{} for _ in range(CLASSES)]
    for k in range(CLASSES):
        draws = [random.gamma(concentration) + 1e-300 for _ in range(CLASSES)]
        edges = np.cumsum(draws) / sum(draws)
        count = labels.count(k)
        for place in range(count):
            slot = next(s for s, edge in enumerate(edges) if place < int(edge * count) or s == CLASSES - 1)
            slots[slot][k] = slots[slot].get(k, 0) + 1
    order: list[int] = []
    for slot in slots:
        for k in random.permutation(list(slot)).tolist():
            order += [k] * slot[k]
    return order


def test_label_correlation_keeps_every_sample_and_grows_as_the_concentration_shrinks() -> None:
    [domain] = some_domains(1, 600)
    whole = sorted(walk(Stream([domain], Scenario())))
    found = [entropies([label for *_, label in walk(Stream([domain], Scenario()))], 30)]
    for concentration in (100.0, 1.0, 0.1, 1e-8):
        samples = walk(Stream([domain], Scenario(order="correlated", concentration=concentration)))
        assert sorted(samples) == whole
        found.append(entropies([label for *_, label in samples], 30))
    assert found == sorted(found, reverse=True)
    assert found[0] > 2.0
    assert found[-1] < 0.5  # nearly all of a class in one slot


@pytest.mark.parametrize("concentration", [0.05, 0.5, 20.0])
def test_label_correlation_is_that_of_the_literature(concentration: float) -> None:
    [domain] = some_domains(1, 400)
    labels = domain.images.labels.tolist()
    random = np.random.default_rng(1)
    repeats = 40
    for size in (10, 40):
        mine, naive = (np.empty(repeats) for _ in range(2))
        for seed in range(repeats):
            scenario = Scenario(order="correlated", concentration=concentration, seed=seed)
            plan = Stream([domain], scenario)._plan
            mine[seed] = entropies(domain.images.labels[plan.rows].tolist(), size)
            naive[seed] = entropies(naive_correlation(labels, concentration, random), size)
        error = np.sqrt((mine.var() + naive.var()) / repeats)
        assert abs(mine.mean() - naive.mean()) < 4 * error


def test_mixed_streams_are_correlated_across_their_domains() -> None:
    scenario = Scenario("mixed", order="correlated", concentration=0.05)
    samples = walk(Stream(some_domains(4, 150), scenario))
    assert entropies([label for *_, label in samples], 30) < 1.0
    assert sorted((number, row) for number, row, _ in samples) == [(n, row) for n in range(4) for row in range(150)]
    in_parts = [len({number for number, _, _ in samples[start : start + 30]}) for start in range(0, 600, 30)]
    assert np.mean(in_parts) > 3.5


# Class balance


def counts_of(stream: Stream) -> list[int]:
    samples = walk(stream)
    assert len(set(samples)) == len(samples)
    return np.bincount([label for *_, label in samples], minlength=CLASSES).tolist()


def test_a_long_tail_has_the_counts_of_its_imbalance_factor() -> None:
    domain = Domain("a", images_of(torch.arange(600) % CLASSES))
    counts = counts_of(Stream([domain], Scenario(balance=10.0)))
    assert (counts[0], counts[-1]) == (60, 6)
    assert all(abs(count - 60 * 10 ** (-k / 9)) <= 1 for k, count in enumerate(counts))
    fewer = counts_of(Stream([domain], Scenario(balance=10.0, samples=100)))
    assert sum(fewer) == 100
    assert all(abs(count - 100 * 10 ** (-k / 9) / 4.094) <= 1 for k, count in enumerate(fewer))
    assert counts_of(Stream([domain], Scenario(balance=1))) == [60] * CLASSES


def test_class_weights_are_followed_as_closely_as_counts_allow() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        labels = torch.from_numpy(random.choice(CLASSES, 300, p=random.dirichlet(np.full(CLASSES, 5.0))))
        weights = random.integers(0, 5, CLASSES) / 4
        weights[0] = 1.0
        there = np.bincount(labels, minlength=CLASSES)
        counts = counts_of(Stream([Domain("a", images_of(labels))], Scenario(balance=tuple(weights))))
        weights[there == 0] = 0
        shares = sum(counts) * weights / weights.sum()
        assert np.abs(counts - shares).max() < 1
        one_more = (sum(counts) + 1) * weights / weights.sum()
        assert (one_more > there).any()  # no longer stream has that balance


def test_balance_and_order_and_sequence_compose() -> None:
    scenario = Scenario("continual", order="correlated", concentration=0.1, balance=5.0, samples=200, interlude=10)
    domains, clean = some_domains(3, 600), images_of(some_labels(200), 3)
    stream = Stream(domains, scenario, clean=clean)
    samples = walk(stream)
    assert stream.segments == tuple(part for n in range(3) for part in ((f"d{n}", 200), ("clean", 10)))
    tail = np.array([5 ** (-k / 9) for k in range(CLASSES)])
    for start in (0, 210, 420):
        counts = np.bincount([label for *_, label in samples[start : start + 200]], minlength=CLASSES)
        assert np.abs(counts - 200 * tail / tail.sum()).max() < 1
    shuffled = walk(Stream(domains, replace(scenario, order="shuffled", concentration=None), clean=clean))
    assert sorted(shuffled) == sorted(samples)
    assert entropies([label for *_, label in samples], 10) < entropies([label for *_, label in shuffled], 10) - 0.7


# What a record says, and what is refused


def test_a_description_is_plain_and_tells_streams_apart() -> None:
    [domain] = some_domains(1)
    weights = (1.0,) * CLASSES
    base = Scenario(balance=weights, samples=20)
    described = Stream([domain], base).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["scenario"]["balance"] == list(weights)
    assert described["samples"] == 20
    assert described["domains"] == [{"name": "d0", "samples": 20, "data": domain.images.fingerprint}]
    orders = {Stream([domain], replace(base, seed=seed)).describe()["order"] for seed in range(5)}
    assert len(orders) == 5
    assert Stream([domain], replace(base, batch=3)).describe()["order"] == described["order"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence": "double"}, "sequence must be single or"),
        ({"order": "sorted"}, "order must be shuffled or given"),
        ({"sequence": "mixed", "order": "given"}, "order must be shuffled or correlated"),
        ({"order": "correlated"}, "concentration belong together"),
        ({"concentration": 0.1}, "concentration belong together"),
        ({"order": "correlated", "concentration": 0.0}, "concentration"),
        ({"order": "correlated", "concentration": float("nan")}, "concentration"),
        ({"balance": 0.5}, "imbalance factor must be at least 1, not 0.5"),
        ({"balance": (1.0, -1.0)}, "balance"),
        ({"balance": (0.0, 0.0)}, "all be zero"),
        ({"balance": (float("inf"),)}, "balance"),
        ({"interlude": -1}, "interlude"),
        ({"samples": 0}, "samples"),
        ({"batch": 0}, "batch"),
        ({"batch": 1.5}, "batch"),
        ({"seed": -1}, "seed"),
    ],
)
def test_scenarios_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenario(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("domains", "scenario", "message"),
    [
        ([], Scenario(), "needs a domain"),
        (some_domains(2), Scenario(), "of one domain, not 2: choose continual"),
        ([*some_domains(1), *some_domains(1)], Scenario("continual"), "two domains of the stream are called d0"),
        (some_domains(1), Scenario(samples=91), "d0 has 90 samples, and 91 are asked for"),
        (some_domains(1), Scenario(balance=9.0, samples=80), "of this class balance, and 80 are asked for"),
        (some_domains(1), Scenario(balance=(1.0, 2.0)), "2 class weights for 10 classes"),
        ([Domain("a", images_of(torch.zeros(5).long()))], Scenario(balance=(0.0,) * 9 + (1.0,)), "a has 0 samples of"),
        (some_domains(2), Scenario("gradual"), "needs d0 at two severities or more"),
        (levels("a", [1]), Scenario("gradual"), "needs a at two severities or more"),
        (levels("a", [1, 2, 3], samples=4), Scenario("gradual"), "4 samples of a are too few for 5 steps"),
        ([*levels("a", [1]), *levels("a", [2], samples=50)], Scenario("gradual"), "not of the same images"),
        (some_domains(1), Scenario(interlude=5), "give them as clean="),
        (
            [*some_domains(1), Domain("grey", from_tensors(torch.zeros(2, 1, 8, 8).byte(), torch.zeros(2).long(), 10))],
            Scenario("continual"),
            "d0 is 3 x 8 x 8 of 10 classes, grey is 1 x 8 x 8 of 10 classes",
        ),
    ],
)
def test_streams_that_cannot_be_are_refused(domains: list[Domain], scenario: Scenario, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stream(domains, scenario)


def test_clean_images_must_be_enough_and_may_not_be_a_domain_too() -> None:
    [domain] = some_domains(1)
    with pytest.raises(ValueError, match="an interlude of 91 samples is longer than the 90 clean ones"):
        Stream([domain], Scenario(interlude=91), clean=domain.images)
    with pytest.raises(ValueError, match="called clean"):
        Stream([Domain("clean", domain.images)], Scenario(interlude=5), clean=domain.images)
    with pytest.raises(ValueError, match="prefetch must not be negative"):
        Stream([domain], Scenario(), prefetch=-1)


def test_a_sample_is_corrupted_alike_in_whatever_stream_it_comes() -> None:
    pixels = torch.randint(0, 256, (30, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    clean = from_tensors(pixels, torch.arange(30) % CLASSES, CLASSES)
    domains = corrupted_domains(clean, ["gaussian_noise", "impulse_noise"], (1, 5), seed=3)
    assert [domain.mark for domain in domains] == [
        "gaussian_noise 1", "gaussian_noise 5", "impulse_noise 1", "impulse_noise 5",
    ]  # fmt: skip
    expected = [
        Corruption(name, severity, 3)(pixels, torch.arange(30)).float() / 255
        for name in ("gaussian_noise", "impulse_noise")
        for severity in (1, 5)
    ]
    for scenario in (Scenario("continual", batch=7), Scenario("mixed", batch=16), Scenario("gradual", batch=11)):
        stream = Stream(domains, scenario)
        start = 0
        for images, _, numbers in stream:
            rows = stream._plan.rows[start : start + len(images)].tolist()
            for image, number, row in zip(images, numbers.tolist(), rows, strict=True):
                assert torch.equal(image, expected[number][row])
            start += len(images)
    first, *_ = Stream(domains, Scenario("continual")).describe()["domains"]
    assert (first["corruption"], first["severity"], first["seed"]) == ("gaussian_noise", 1, 3)


def test_a_strength_of_ones_own_takes_the_place_of_severities() -> None:
    pixels = torch.randint(0, 256, (6, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    clean = from_tensors(pixels, torch.arange(6), CLASSES)
    (domain,) = corrupted_domains(clean, ["jpeg_compression"], strength=(30,))
    assert (domain.mark, domain.notes["strength"]) == ("jpeg_compression", [30])
    for row, image in enumerate(domain.images.read(torch.arange(6))):
        file = io.BytesIO()
        Image.fromarray(pixels[row].permute(1, 2, 0).numpy()).save(file, "JPEG", quality=30)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(Image.open(file)))
