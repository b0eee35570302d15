"""The data sets by name: their files, sizes, classes and normalisation, and the numbers that the paper has for them."""

from __future__ import annotations

from dataclasses import replace

from ttac.common.lookup import pick
from ttac.data.corruptions.constants import NAMES, SEVERITIES
from ttac.data.sets.spec import DatasetSpec, PaperNumbers, RemoteFile


def get_spec(name: str) -> DatasetSpec:
    """Give the data set of a name, or raise an error that suggests one.

    >>> get_spec("cifar10").num_classes
    10
    """
    return pick(name, SPECS, "data set")


def paper_numbers() -> dict[str, PaperNumbers]:
    """Collect the paper's columns of all data sets, by the name of the preset.

    >>> paper_numbers()["paper-imagenet"].passes
    2
    """
    return {name: numbers for spec in SPECS.values() for name, numbers in spec.presets.items()}


_PAPER = {"paper": PaperNumbers(window=256, lr=0.01, tau_tc=-0.001, clip_global=1280, clip_class=128)}
_PAPER_CIFAR100 = {
    "paper-cifar100": PaperNumbers(
        window=256, lr=1e-4, tau_tc=-0.001, clip_global=1280, clip_class=64, divergence_weight=0.5
    )
}
_PAPER_VISDA = {"paper-visda": PaperNumbers(window=128, lr=1e-4, tau_tc=-0.01, clip_global=1536, clip_class=128)}
_PAPER_IMAGENET = {
    "paper-imagenet": PaperNumbers(window=128, lr=7e-5, tau_tc=-0.01, clip_global=1280, clip_class=64, passes=2)
}

_CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest",
    "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard",
    "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum",
    "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
    "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone",
    "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
)  # fmt: skip
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_CIFAR_UNPACKED = 200_000_000
_CIFAR10 = DatasetSpec(
    "cifar10",
    "CIFAR-10, python or binary version",
    "cifar",
    10,
    {"train": 50_000, "test": 10_000},
    "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
    files=(
        RemoteFile(
            _TORONTO + "cifar-10-python.tar.gz",
            170_498_071,
            "c58f30108f718f92721af3b95e74349a",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            "cifar-10-batches-py",
            _CIFAR_UNPACKED,
        ),
        RemoteFile(
            _TORONTO + "cifar-10-binary.tar.gz",
            170_052_171,
            "c32a1d4ab5d03f1284b67883e8d87530",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "cifar-10-batches-bin",
            _CIFAR_UNPACKED,
            optional=True,
        ),
    ),
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    presets=_PAPER,
)
_CIFAR100 = replace(
    _CIFAR10,
    name="cifar100",
    title="CIFAR-100 (fine labels), python or binary version",
    num_classes=100,
    classes=_CIFAR100_CLASSES,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    folders=("cifar-100-python", "cifar-100-binary"),
    files=(
        RemoteFile(
            _TORONTO + "cifar-100-python.tar.gz",
            169_001_437,
            "eb9058c3a382ffc7106e4002c42a8d85",
            None,
            "cifar-100-python",
            _CIFAR_UNPACKED,
        ),
        RemoteFile(
            _TORONTO + "cifar-100-binary.tar.gz",
            168_513_733,
            "03b5dce01913d631647c71ecec9e9cb8",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            "cifar-100-binary",
            _CIFAR_UNPACKED,
            optional=True,
        ),
    ),
    md5={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    presets=_PAPER_CIFAR100,
)
_CORRUPTED = "Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions, ICLR 2019"
_CIFAR10_C = replace(
    _CIFAR10,
    name="cifar10-c",
    title="CIFAR-10-C: CIFAR-10's test images, corrupted",
    layout="cifar-c",
    counts={"test": 10_000},
    citation=_CORRUPTED,
    source="cifar10",
    domains=NAMES[:15],
    extra_domains=NAMES[15:],
    severities=SEVERITIES,
    folders=("CIFAR-10-C",),
    files=(
        RemoteFile(
            "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar?download=1",
            2_918_471_680,
            "56bf5dcef84df0e2308c6dcbcbbd8499",
            "c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
            "CIFAR-10-C",
        ),
    ),
    md5={},
    terms="CC BY 4.0",
)
_CIFAR100_C = replace(
    _CIFAR10_C,
    name="cifar100-c",
    title="CIFAR-100-C: CIFAR-100's test images, corrupted",
    num_classes=100,
    classes=_CIFAR100_CLASSES,
    mean=_CIFAR100.mean,
    std=_CIFAR100.std,
    source="cifar100",
    folders=("CIFAR-100-C",),
    files=(
        RemoteFile(
            "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar?download=1",
            2_918_473_216,
            "11f0ed0f1191edbf9fa23466ae6021d3",
            None,
            "CIFAR-100-C",
        ),
    ),
    presets=_PAPER_CIFAR100,
)
_MODESTY = "https://github.com/modestyachts/CIFAR-10.1/raw/master/datasets/"
_CIFAR10_1 = replace(
    _CIFAR10,
    name="cifar10.1",
    title="CIFAR-10.1: new test images for CIFAR-10, v6 and v4",
    layout="cifar10.1",
    counts={"v6": 2000, "v4": 2021},
    citation="Recht et al., Do CIFAR-10 Classifiers Generalize to CIFAR-10?, 2018",
    source="cifar10",
    domains=("v6", "v4"),
    folders=("CIFAR-10.1", "datasets"),
    files=(
        RemoteFile(
            _MODESTY + "cifar10.1_v6_data.npy",
            6_144_128,
            "4fcae82cb1326aec9ed1dc1fc62345b8",
            "2997188e5816f5bd545dc77771b6227828c28146049fcecf3fa10775474cacc6",
        ),
        RemoteFile(
            _MODESTY + "cifar10.1_v6_labels.npy",
            8128,
            "09a97fb7c430502fcbd69d95093a3f85",
            "ae40beda001693674edc94d925ee8268cfe68905f8f9aff800c8dcdfcd6c9448",
        ),
        RemoteFile(
            _MODESTY + "cifar10.1_v4_data.npy",
            6_208_640,
            sha256="5aaedc268df8f4cffca2ac0cf9e608ae1897a8cddb630c7a850a2ea8f6558e75",
        ),
        RemoteFile(
            _MODESTY + "cifar10.1_v4_labels.npy",
            8212,
            sha256="1f9544300ded199539b6662364ce7fe6c2e1ea9f87408f06db4b1a6184cffb18",
        ),
    ),
    md5={},
)
_CIFAR10_JPG = replace(
    _CIFAR10,
    name="cifar10-jpg",
    title="CIFAR-10 as it comes back from JPEG files, as arrays",
    layout="arrays",
    folders=(),
    files=(),
    md5={},
    manual="It is made from JPEG files of CIFAR-10: put {train,test}_images.npy (uint8 [N, 32, 32, 3]) and "
    "{train,test}_labels.npy (integers [N]) into FOLDER.",
    presets={},
)
_IMAGENET = DatasetSpec(
    "imagenet",
    "ImageNet (ILSVRC 2012), one folder a class",
    "image-folders",
    1000,
    {"train": 1_281_167, "val": 50_000},
    "Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, IJCV 2015",
    size=(224, 224),
    crop_pct=0.875,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    domains=("val",),
    folders=("ImageNet", "ILSVRC2012"),
    manual="It needs an account: agree to the terms at https://image-net.org/download, take ILSVRC2012_img_train.tar "
    "and ILSVRC2012_img_val.tar, and unpack them as FOLDER/train/<wnid>/*.JPEG and FOLDER/val/<wnid>/*.JPEG.",
    terms="non-commercial research and education, by agreement with image-net.org",
    presets=_PAPER_IMAGENET,
)
_ZENODO = "https://zenodo.org/records/2235448/files/"
_IMAGENET_C = replace(
    _IMAGENET,
    name="imagenet-c",
    title="ImageNet-C: ImageNet's validation images, corrupted",
    layout="imagenet-c",
    counts={"test": 50_000},
    citation=_CORRUPTED,
    crop_pct=1.0,  # the files are 224 x 224 already
    source="imagenet",
    domains=NAMES[:15],
    extra_domains=NAMES[15:],
    severities=SEVERITIES,
    folders=("ImageNet-C",),
    # Compressed in spite of their names: their sizes are not those of plain archives. JPEG files hardly shrink.
    files=tuple(
        RemoteFile(f"{_ZENODO}{group}.tar?download=1", size, md5, None, group, size * 5 // 4, group == "extra")
        for group, size, md5 in (
            ("noise", 22_565_673_785, "e80562d7f6c3f8834afb1ecf27252745"),
            ("blur", 7_112_704_951, "2d8e81fdd8e07fef67b9334fa635e45c"),
            ("weather", 12_797_438_995, "33ffea4db4d93fe4a428c40a6ce0c25d"),
            ("digital", 7_757_510_705, "89157860d7b10d5797849337ca2e5c03"),
            ("extra", 15_789_490_144, "d492dfba5fc162d8ec2c3cd8ee672984"),
        )
    ),
    manual="",
    terms="CC BY 4.0",
)
_VISDA_CLASSES = (
    "aeroplane", "bicycle", "bus", "car", "horse", "knife", "motorcycle", "person",
    "plant", "skateboard", "train", "truck",
)  # fmt: skip
_VISDA_C = replace(
    _IMAGENET,
    name="visda-c",
    title="VisDA-C 2017: renderings to train on, photographs to adapt to",
    num_classes=12,
    counts={"train": 152_397, "validation": 55_388, "test": 72_372},
    citation="Peng et al., VisDA: The Visual Domain Adaptation Challenge, 2017",
    classes=_VISDA_CLASSES,
    domains=("validation",),
    extra_domains=("test",),
    folders=("visda", "VisDA-C"),
    # No checksums are published, and no size of test.tar is known here.
    files=tuple(
        RemoteFile(f"http://csr.bu.edu/ftp/visda17/clf/{part}.tar", size, unpacks_to=part, optional=part == "test")
        for part, size in (("train", 7_698_031_104), ("validation", 1_023_758_336), ("test", None))
    ),
    manual="The labels of test.tar are apart: put https://raw.githubusercontent.com/VisionLearningGroup/"
    "taskcv-2017-public/master/classification/data/image_list.txt into FOLDER/test.",
    terms="non-commercial research and education; the images are not to be passed on",
    presets=_PAPER_VISDA,
)
_DIGITS = DatasetSpec(
    "digits",
    "scikit-learn's handwritten digits at 32 x 32",
    "embedded",
    10,
    {"train": 797, "test": 1000},
    "Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, 1998",
    channels=1,
    classes=tuple(map(str, range(10))),
    package="sklearn",
    manual="They come with scikit-learn: pip install 'ttac[demo]'.",
)
_GLYPHS = replace(
    _DIGITS,
    name="glyphs",
    title="digits drawn from fonts at 32 x 32: the synthetic source of digits",
    counts={"train": 4000, "test": 1000},
    citation="drawn by ttac from matplotlib's DejaVu, STIX and Computer Modern fonts",
    package="matplotlib",
    manual="They are drawn from matplotlib's fonts: pip install 'ttac[report]'.",
)
SPECS: dict[str, DatasetSpec] = {
    spec.name: spec
    for spec in (
        _DIGITS,
        _GLYPHS,
        _CIFAR10,
        _CIFAR100,
        _CIFAR10_C,
        _CIFAR100_C,
        _CIFAR10_1,
        _CIFAR10_JPG,
        _IMAGENET,
        _IMAGENET_C,
        _VISDA_C,
    )
}
