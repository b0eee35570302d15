"""The registry of data sets holds together, and the methods have the paper's numbers for them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ttac.data.corruptions import CORRUPTIONS, EXTRA
from ttac.data.sets import data_root, find_data
from ttac.data.sets.spec import DatasetSpec
from ttac.data.sets.specs import SPECS, get_spec
from ttac.methods.registry import methods
from ttac.methods.ttac import PAPER


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_spec_holds_together(spec: DatasetSpec) -> None:
    assert SPECS[spec.name] is spec
    assert spec.classes is None or len(set(spec.classes)) == len(spec.classes) == spec.num_classes
    assert (spec.mean is None) == (spec.std is None)
    for moments in (spec.mean, spec.std):
        assert moments is None or (len(moments) == spec.channels and all(0 < value < 1 for value in moments))
    assert spec.source is None or SPECS[spec.source].classes == spec.classes
    assert not set(spec.domains) & set(spec.extra_domains)
    assert spec.files or spec.manual
    assert len({file.name for file in spec.files}) == len(spec.files)
    for file in spec.files:
        assert urlsplit(file.url).scheme == ("http" if spec.name == "visda-c" else "https")
        kind, _, digits = (file.checksum or "md5:" + 32 * "0").partition(":")
        assert len(bytes.fromhex(digits)) == {"md5": 16, "sha256": 32}[kind]
        assert spec.name == "visda-c" or (file.size and file.checksum)
        assert (file.unpacks_to is None) == file.name.endswith(".npy")
        assert file.unpacked is None or file.size is None or file.unpacked > file.size
        # An archive that is not compressed consists of blocks.
        assert file.unpacks_to is None or file.unpacked or file.size is None or file.size % 512 == 0


def test_corrupted_sets_have_the_corruptions_that_can_be_made() -> None:
    for name in ("cifar10-c", "cifar100-c", "imagenet-c"):
        assert (get_spec(name).domains, get_spec(name).extra_domains) == (CORRUPTIONS, EXTRA)


def test_sizes_of_arrays_are_those_of_their_shapes() -> None:
    for file in get_spec("cifar10.1").files:
        count = get_spec("cifar10.1").counts["v4" if "v4" in file.name else "v6"]
        assert file.size == 128 + count * (3072 if "data" in file.name else 4)  # int32 labels
    for name in ("cifar10-c", "cifar100-c"):  # 19 corruptions at five severities, and the labels
        assert (get_spec(name).files[0].size or 0) >= 19 * 50_000 * 3072


def test_a_wrong_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"unknown data set: 'cifar-10'; did you mean cifar10"):
        get_spec("cifar-10")


def test_the_columns_of_the_papers_table_reach_the_methods() -> None:
    columns = {  # window, lr, tau_tc, clips, passes, weight of both divergences
        "paper": (256, 0.01, -0.001, 1280, 128, 4, 0.05),
        "paper-cifar100": (256, 0.0001, -0.001, 1280, 64, 4, 0.5),
        "paper-visda": (128, 0.0001, -0.01, 1536, 128, 4, 0.05),
        "paper-imagenet": (128, 0.00007, -0.01, 1280, 64, 2, 0.05),
    }
    names = ("window", "lr", "tau_tc", "clip_global", "clip_class", "passes", "class_weight")
    further = {"ttac": {}, "ttac++": {"self_train_weight": 20}, "ttac+shot": {"information_weight": 2}}
    assert set(PAPER) == set(columns)
    for method, factors in further.items():
        presets = methods()[method].presets
        assert set(presets) - {"fast", "deep"} == set(columns)  # those two are ours
        for preset, column in columns.items():
            options = presets[preset]
            settled = {name: value for name, value in PAPER[preset].items() if name not in factors}
            assert settled.items() <= options.items()
            assert tuple(options[name] for name in names) == column
            assert (options["global_weight"], options["queue"], options["raw_divergence"]) == (column[-1], 4096, True)
            assert (options["inferred_trust"], options["hold_weight"]) == (1.0, 0.0)
            for option, factor in factors.items():
                assert options[option] == pytest.approx(factor * column[-1])
            methods()[method].options_type(**options)


def test_the_root_is_told_or_in_the_environment_or_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("TTAC_DATA", raising=False)
    assert data_root() == Path("/somewhere/ttac/data")
    monkeypatch.setenv("TTAC_DATA", "/data")
    assert data_root() == Path("/data")
    assert data_root(Path("told")) == Path("told")


def test_the_home_folder_is_known_wherever_a_path_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TTAC_DATA", "~/data")
    assert data_root() == tmp_path / "data"
    assert data_root(Path("~/other")) == tmp_path / "other"
    for data in ("~/arrays", "cifar10-jpg=~/arrays"):
        with pytest.raises(FileNotFoundError, match=f"no folder {tmp_path}/arrays"):
            find_data(data)
