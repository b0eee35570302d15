"""The split of a network into backbone and head, on the models of timm, torchvision and transformers and by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ttac
from ttac import Classifier, SourceStatistics, checks
from ttac.data.classes import replace_head
from ttac.methods.registry import methods
from ttac.model.classifier import NEED_LOGITS_ALONE
from ttac.model.heads import HeadError, probe_images
from ttac.model.networks import ResNet
from ttac.model.weights import LoadedModel, ModelDescription

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
CLASSES = 7


def of_timm(name: str, **options: Any) -> nn.Module:
    return pytest.importorskip("timm").create_model(name, pretrained=False, num_classes=CLASSES, **options)


def of_torchvision(name: str, **options: Any) -> nn.Module:
    return getattr(pytest.importorskip("torchvision").models, name)(num_classes=CLASSES, **options)


def of_transformers(kind: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, **options)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


TINY_VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TINY_CNN = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
TV_VIT = {"image_size": 48, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 24, "mlp_dim": 48}
TV_SWIN = {"patch_size": [4, 4], "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": [4, 4]}


class Zoo(NamedTuple):
    build: Callable[..., nn.Module]
    name: str
    options: dict[str, Any]
    head: str
    width: int
    side: int = 64


ZOO = [
    Zoo(of_timm, "resnet18", {}, "fc", 512),
    Zoo(of_timm, "vit_tiny_patch16_224", {"img_size": 64}, "head", 192),
    Zoo(of_timm, "convnext_atto", {}, "head.fc", 320),
    # Its num_features is 576: the head is behind one more layer.
    Zoo(of_timm, "mobilenetv3_small_100", {}, "classifier", 1024),
    Zoo(of_timm, "swin_tiny_patch4_window7_224", {"img_size": 64, "embed_dim": 24, "depths": (1,) * 4}, "head.fc", 192),
    Zoo(of_timm, "mobilevit_xxs", {}, "head.fc", 320),
    # Its get_classifier() is a norm and a linear layer, which takes a probe pass to tell.
    Zoo(of_timm, "repvit_m0_9", {"distillation": False}, "head.head.l", 384),
    Zoo(of_torchvision, "resnet18", {}, "fc", 512),
    Zoo(of_torchvision, "mobilenet_v3_small", {}, "classifier.3", 1024),
    Zoo(of_torchvision, "efficientnet_b0", {}, "classifier.1", 1280),
    Zoo(of_torchvision, "convnext_tiny", {}, "classifier.2", 768),
    Zoo(of_torchvision, "densenet121", {}, "classifier", 1024),
    Zoo(of_torchvision, "VisionTransformer", TV_VIT, "heads.head", 24, 48),
    Zoo(of_torchvision, "SwinTransformer", TV_SWIN, "head", 24),
    Zoo(of_transformers, "ViT", {"image_size": 48, **TINY_VIT}, "classifier", 24, 48),
    Zoo(of_transformers, "ResNet", {"embedding_size": 8, **TINY_CNN}, "classifier.1", 32),
    Zoo(of_transformers, "ConvNext", TINY_CNN, "classifier", 32),
]


@pytest.fixture(autouse=True)
def _same_weights_each_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=ZOO, ids=lambda zoo: f"{zoo.build.__name__[3:]}-{zoo.name}")
def split(request: pytest.FixtureRequest) -> tuple[Zoo, Classifier]:
    """A zoo model in eval mode, wrapped; fresh weights alone would give features and logits of nearly zero."""
    zoo: Zoo = request.param
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = Classifier(zoo.build(zoo.name, **zoo.options), mean=MEAN, std=STD)
        nn.init.normal_(classifier.head.weight)
        for module in classifier.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # the plain average of all batches, here of one
        with torch.no_grad():
            classifier.train()(random_images(8, zoo.side))
    return zoo, classifier.eval()


def random_images(count: int = 2, side: int = 32, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(1))


def normalised(images: Tensor) -> Tensor:
    return (images - torch.tensor(MEAN).reshape(1, 3, 1, 1)) / torch.tensor(STD).reshape(1, 3, 1, 1)


def hooks_of(model: nn.Module) -> list[Any]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]


def plain_network(**layers: nn.Module) -> nn.Sequential:
    """A convolution and a pool, with the given layers after them."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for name, layer in layers.items():
        network.add_module(name, layer)
    return network


class Named(nn.Module):
    """Layers by name, and a function of them and the pooled features as the forward pass."""

    def __init__(self, compute: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.compute = compute
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, images: Tensor) -> Any:
        return self.compute(self, self.stem(images))


class TestZoo:
    def test_agrees_with_the_model(self, split: tuple[Zoo, Classifier]) -> None:
        zoo, classifier = split
        assert classifier.head_name == zoo.head
        assert (classifier.feature_dim, classifier.num_classes, classifier.channels) == (zoo.width, CLASSES, 3)
        images = random_images(side=zoo.side)
        with torch.no_grad():
            output = classifier.model(normalised(images))
            expected = output.logits if zoo.build is of_transformers else output
            features, logits = classifier.features_and_logits(images)
            assert features.shape == (2, zoo.width)
            assert expected.std() > 0.01
            assert torch.equal(logits, expected)
            assert torch.equal(classifier(images), expected)
            assert torch.equal(classifier.features(images), features)
            torch.testing.assert_close(classifier.logits(features), expected)
            model: Any = classifier.model
            if zoo.build is of_timm and model.get_classifier() is classifier.head:
                own = model.forward_head(model.forward_features(normalised(images)), pre_logits=True)
                torch.testing.assert_close(features, own)

    def test_copy_is_independent(self, split: tuple[Zoo, Classifier]) -> None:
        zoo, classifier = split
        images = random_images(side=zoo.side)
        with torch.no_grad():
            before = classifier(images)
            other = classifier.copy()
            assert torch.equal(other(images), before)
            other.head.weight.add_(1.0)
            assert not torch.equal(other(images), before)
            assert torch.equal(classifier(images), before)
        assert not {*map(id, other.parameters())} & {*map(id, classifier.parameters())}
        assert hooks_of(classifier) == hooks_of(other) == []

    def test_gradient_reaches_the_backbone(self, split: tuple[Zoo, Classifier]) -> None:
        zoo, classifier = split
        stem = next(module for module in classifier.modules() if isinstance(module, nn.Conv2d)).weight
        features, logits = classifier.features_and_logits(random_images(side=zoo.side))
        for output in (features, logits):
            (gradient,) = torch.autograd.grad(output.square().sum(), stem, retain_graph=True)
            assert gradient.isfinite().all()
            assert gradient.abs().max() > 0

    def test_backbone_is_all_but_the_head(self, split: tuple[Zoo, Classifier]) -> None:
        zoo, classifier = split
        everything = dict(classifier.named_parameters())
        head = {name for name in everything if name.startswith(f"model.{zoo.head}.")}
        assert len(head) == 2
        assert set(classifier.backbone_parameters()) == set(everything) - head


class TestFindingTheHead:
    @pytest.mark.parametrize("name", ["fc", "classifier", "head", "linear"])
    def test_plain_names(self, name: str) -> None:
        layers = {"hidden": nn.Linear(8, 5), "act": nn.ReLU(), name: nn.Linear(5, 4)}
        assert Classifier(plain_network(**layers), mean=0, std=1).head_name == name

    def test_the_only_linear_layer(self) -> None:
        assert Classifier(plain_network(anything=nn.Linear(8, 4)), mean=0, std=1).head_name == "anything"

    def test_by_dotted_name(self) -> None:
        network = nn.Sequential(plain_network(a=nn.Linear(8, 5), b=nn.ReLU(), c=nn.Linear(5, 4)))
        assert Classifier(network, head="0.c", mean=0, std=1).features(random_images()).shape == (2, 5)

    def test_probe_decides_without_usual_names(self) -> None:
        classifier = Classifier(plain_network(a=nn.Linear(8, 5), b=nn.ReLU(), c=nn.Linear(5, 4)), mean=0, std=1)
        assert classifier.head_name == "c"
        assert hooks_of(classifier) == []

    def test_probe_decides_between_usual_names(self) -> None:
        network = Named(lambda self, z: self.fc(self.head(z)), head=nn.Linear(8, 8), fc=nn.Linear(8, 4))
        assert Classifier(network, mean=0, std=1).head_name == "fc"

    def test_probe_changes_no_mode_and_no_buffer(self) -> None:
        network = plain_network(norm=nn.BatchNorm1d(8), a=nn.Linear(8, 5), b=nn.ReLU(), c=nn.Linear(5, 4))
        network[1].eval()
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        Classifier(network, mean=0, std=1)
        assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
        assert [module.training for module in network] == [True, False, *[True] * 6]

    def test_one_layer_under_two_names(self) -> None:
        shared = nn.Linear(8, 4)
        network = Named(lambda self, z: self.head(z), fc=shared, head=shared, spare=nn.Linear(8, 4))
        for classifier in (Classifier(network, mean=0, std=1), Classifier(network, head="head", mean=0, std=1)):
            assert classifier.head is shared
            assert set(classifier.backbone_parameters()) == {
                "model.stem.0.weight",
                "model.stem.0.bias",
                "model.spare.weight",
                "model.spare.bias",
            }

    def test_compiled_model(self) -> None:
        network = torch.compile(plain_network(fc=nn.Linear(8, 4)), backend="eager")
        classifier = Classifier(network, mean=0, std=1)
        for _ in range(2):
            features, logits = classifier.features_and_logits(random_images())
            torch.testing.assert_close(classifier.logits(features), logits)
        assert {name.rpartition("_orig_mod.")[2] for name in classifier.backbone_parameters()} == {"0.weight", "0.bias"}

    @pytest.mark.parametrize("training", [True, False])
    def test_logits_of_a_named_tuple(self, training: bool) -> None:
        """GoogLeNet has auxiliary heads, and returns a tuple with .logits while it is trained."""
        classifier = Classifier(of_torchvision("googlenet", init_weights=False), mean=0, std=1).train(training)
        features, logits = classifier.features_and_logits(random_images(side=64))
        assert features.shape == (2, 1024)
        assert logits.shape == (2, CLASSES)


def convolutional_head(*between: nn.Module) -> nn.Sequential:
    """A network with a convolution to classes and a mean over positions; SqueezeNet has a ReLU between the two."""
    body = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(*body, nn.Conv2d(8, 5, 1), *between, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def without_head() -> nn.Sequential:
    return convolutional_head(nn.ReLU()).eval()


def assert_headless(classifier: Classifier, reason: str) -> None:
    """It predicts, and says why where a linear head is needed."""
    assert not classifier.has_linear_head
    assert "no linear head" in repr(classifier)
    needs: list[Callable[[], Any]] = [
        lambda: classifier.head,
        lambda: classifier.feature_dim,
        lambda: classifier.features(random_images()),
        lambda: SourceStatistics.infer(classifier),
        lambda: ttac.adapt(classifier, "shot"),
        lambda: ttac.adapt(classifier, "t3a"),
        lambda: ttac.adapt(classifier, "adacontrast"),
    ]
    for need in needs:
        with pytest.raises(
            HeadError, match=f"(?s)needs a linear head.*logits alone .test, bn, tent, conjugate.*{reason}"
        ):
            need()


class TestOutputs:
    @pytest.mark.parametrize(
        "compute",
        [
            lambda self, z: {"logits": self.fc(z), "z": z},
            lambda self, z: {"out": self.fc(z), "aux": z},
            lambda self, z: (self.fc(z), z),
            lambda self, z: [self.fc(z)],
            lambda self, z: SimpleNamespace(logits=self.fc(z)),
        ],
    )
    def test_logits_are_found_in_what_a_model_returns(self, compute: Callable[[Any, Tensor], Any]) -> None:
        network = Named(compute, fc=nn.Linear(8, 4))
        classifier = Classifier(network, mean=0, std=1)
        assert classifier.head_name == "fc"
        assert torch.equal(classifier(random_images()), network.fc(network.stem(random_images())))

    def test_the_auxiliary_head_of_inception_does_not_count(self) -> None:
        network = of_torchvision("inception_v3", init_weights=False)
        classifier = Classifier(network, mean=0, std=1).train()
        features, logits = classifier.features_and_logits(random_images(side=299))
        assert features.shape == (2, 2048)
        torch.testing.assert_close(classifier.logits(features), logits)


class TestConvolutionalHeads:
    @pytest.mark.parametrize("network", [convolutional_head(), convolutional_head(nn.Dropout())])
    def test_it_is_a_linear_head_on_averaged_features(self, network: nn.Sequential) -> None:
        classifier = Classifier(network.eval(), mean=MEAN, std=STD)
        assert (classifier.head_name, classifier.feature_dim, classifier.num_classes) == ("3", 8, 5)
        images = random_images()
        features, logits = classifier.features_and_logits(images)
        assert torch.equal(features, network[:3](normalised(images)).mean((2, 3)))
        assert torch.equal(logits, network(normalised(images)))
        torch.testing.assert_close(classifier.logits(features), logits)
        assert not {"model.3.weight", "model.3.bias"} & set(classifier.backbone_parameters())

    @pytest.mark.parametrize("name", ["dla46_c", "resnetv2_50"])
    def test_convolutional_heads_of_timm(self, name: str) -> None:
        classifier = Classifier(of_timm(name).eval())
        images = random_images(side=64)
        features, logits = classifier.features_and_logits(images)
        assert isinstance(classifier.model.get_submodule(classifier.head_name), nn.Conv2d)
        torch.testing.assert_close(classifier.logits(features), logits)
        assert SourceStatistics.infer(classifier).classes.mean.shape == (CLASSES, classifier.feature_dim)

    @pytest.mark.parametrize("method", ["ttac++", "shot", "t3a", "adacontrast"])
    def test_methods_with_anchors_keep_their_promises(self, method: str) -> None:
        checks.run_all(method, Classifier(convolutional_head().eval(), mean=0, std=1), side=8)

    def test_it_can_be_replaced_for_other_classes(self) -> None:
        loaded = LoadedModel(Classifier(convolutional_head(), mean=0, std=1), ModelDescription("own", 5))
        replace_head(loaded, 9)
        assert loaded.classifier(random_images()).shape == (2, 9)


class TestWithoutALinearHead:
    def test_distilled(self) -> None:
        classifier = Classifier(of_timm("deit_tiny_distilled_patch16_224", img_size=32))
        assert_headless(classifier, "gives 2 heads.*use the variant without distillation")

    def test_timm_identity(self) -> None:
        model = pytest.importorskip("timm").create_model("resnet18", num_classes=0)
        with pytest.raises(HeadError, match=r"get_classifier\(\) gives is an identity; build the model with"):
            Classifier(model, mean=0, std=1)

    def test_squeezenet(self) -> None:
        classifier = Classifier(of_torchvision("squeezenet1_1"), mean=0, std=1)
        assert_headless(classifier, r"'classifier\.1' is a convolution that is no linear layer on averaged features")

    def test_a_convolution_over_neighbours(self) -> None:
        network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        for name, layer in (("fc", nn.Conv2d(8, 5, 3)), ("pool", nn.AdaptiveAvgPool2d(1)), ("flat", nn.Flatten())):
            network.add_module(name, layer)
        assert_headless(Classifier(network, mean=0, std=1), "'fc' is a convolution of more than single positions")

    def test_the_methods_that_are_named_are_all_that_need_no_head(self) -> None:
        usable = []
        for name, method in methods().items():
            if method.uses(method.options_type()):
                continue  # statistics and branches are of features
            try:
                ttac.adapt(Classifier(without_head(), mean=0, std=1), name)
            except HeadError:
                continue
            usable.append(name)
        assert sorted(usable) == sorted(NEED_LOGITS_ALONE)

    def test_identity_in_place_of_the_head(self) -> None:
        network = plain_network(a=nn.Linear(8, 8), b=nn.ReLU(), fc=nn.Identity())
        with pytest.raises(HeadError, match="'fc' is an identity; build the model with its classification layer"):
            Classifier(network, mean=0, std=1)

    def test_no_linear_layer_says_what_was_tried(self) -> None:
        message = r"no linear layer.*Tried: of the usual names fc, classifier, head, linear, .*none exists"
        assert_headless(Classifier(plain_network(), mean=0, std=1), message)

    def test_two_equal_candidates(self) -> None:
        network = Named(lambda self, z: (self.fc(z), self.head(z))[0], fc=nn.Linear(8, 4), head=nn.Linear(8, 4))
        network.head.load_state_dict(network.fc.state_dict())
        message = r"each of fc, head gives.*name the head with head=.*'fc' may be the head; 'head' may be the head"
        assert_headless(Classifier(network, mean=0, std=1), message)
        assert Classifier(network, head="fc", mean=0, std=1).head is network.fc

    def test_two_averaged_candidates(self) -> None:
        network = Named(lambda self, z: (self.fc(z) + self.head(z)) / 2, fc=nn.Linear(8, 4), head=nn.Linear(8, 4))
        message = r"no linear layer gives the model's output.*something follows the last one\. Tried"
        assert_headless(Classifier(network, mean=0, std=1), message)
        assert hooks_of(network) == []

    def test_an_explicit_name_is_still_refused(self) -> None:
        with pytest.raises(HeadError, match="is a convolution"):
            Classifier(of_torchvision("squeezenet1_1"), head="classifier.1", mean=0, std=1)

    def test_it_predicts_what_the_model_does(self) -> None:
        classifier = Classifier(without_head(), mean=MEAN, std=STD)
        images = random_images()
        torch.testing.assert_close(classifier(images), classifier.model(normalised(images)))
        assert (classifier.num_classes, classifier.copy().num_classes) == (5, 5)
        assert classifier.fingerprint() == classifier.copy().fingerprint()
        assert classifier.backbone_parameters().keys() == dict(classifier.named_parameters()).keys()

    @pytest.mark.parametrize("method", ["bn", "tent", "conjugate", "test"])
    def test_methods_that_need_logits_alone_keep_their_promises(self, method: str) -> None:
        checks.run_all(method, Classifier(without_head(), mean=0, std=1), side=8)

    @pytest.mark.parametrize("method", ["bn", "tent"])
    def test_it_adapts_over_a_stream(self, method: str) -> None:
        classifier = Classifier(without_head(), mean=0, std=1)
        adapter = ttac.adapt(classifier, method, window=8)
        images = random_images(20)
        before = adapter.predict(images)
        stream = [(part, torch.arange(len(part)) % 5) for part in images.split(6)]
        record = ttac.evaluate(adapter, stream, "N-O-SF")
        assert record.samples == 20
        assert record.counters["skipped_steps"] == 0
        assert record.counters["steps"] == (2 if method == "tent" else 0)
        assert not torch.allclose(adapter.predict(images), before)
        assert isinstance(adapter.adapted().model, nn.Sequential)

    def test_networks_of_other_libraries_adapt(self) -> None:
        classifier = Classifier(of_timm("deit_tiny_distilled_patch16_224", img_size=64).eval())
        adapter = ttac.adapt(classifier, "tent", window=4)
        images = torch.rand(6, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        assert bool(adapter(images).isfinite().all())
        assert (adapter.counters()["steps"], adapter.counters()["skipped_steps"]) == (1, 0)


class TestRefusals:
    def test_no_image_size_fits(self) -> None:
        network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
        message = r"(?s)no probe pass was possible.*3 x 32 x 32: .*1 x 28 x 28: .*Tried: .*Linear layers: 1, 3"
        with pytest.raises(HeadError, match=message):
            Classifier(network, mean=0, std=1)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("nothing", "does not exist"),
            ("0", "is a convolution"),
            ("act", "is a ReLU, not a linear layer"),
            ("skip", "is an identity"),
        ],
    )
    def test_bad_name(self, name: str, reason: str) -> None:
        network = plain_network(a=nn.Linear(8, 8), act=nn.ReLU(), skip=nn.Identity(), b=nn.Linear(8, 4))
        with pytest.raises(HeadError, match=rf"head='{name}' {reason}.*Linear layers of this model: a, b"):
            Classifier(network, head=name, mean=0, std=1)

    def test_something_after_the_head(self) -> None:
        classifier = Classifier(plain_network(fc=nn.Linear(8, 4), log=nn.LogSoftmax(1)), mean=0, std=1)
        with pytest.raises(HeadError, match=r"output of 'fc' is not the model's output \(something follows it"):
            classifier(random_images())

    def test_something_after_a_small_head(self) -> None:
        classifier = Classifier(plain_network(fc=nn.Linear(8, 4), relu=nn.ReLU()), mean=0, std=1)
        nn.init.constant_(classifier.head.weight, -1e-8)
        nn.init.zeros_(classifier.head.bias)
        with pytest.raises(HeadError, match="output of 'fc' is not the model's output"):
            classifier(random_images())

    def test_an_empty_batch_proves_nothing(self) -> None:
        classifier = Classifier(plain_network(fc=nn.Linear(8, 4), log=nn.LogSoftmax(1)), mean=0, std=1)
        assert classifier(torch.zeros(0, 3, 8, 8)).shape == (0, 4)
        with pytest.raises(HeadError, match="output of 'fc' is not the model's output"):
            classifier(random_images())

    def test_a_layer_that_is_not_the_last(self) -> None:
        classifier = Classifier(
            plain_network(a=nn.Linear(8, 4), b=nn.ReLU(), fc=nn.Linear(4, 4)), head="a", mean=0, std=1
        )
        with pytest.raises(HeadError, match="output of 'a' is not the model's output"):
            classifier(random_images())

    def test_head_for_each_position(self) -> None:
        tokens = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(2), Transpose(), nn.Linear(8, 4), Mean())
        with pytest.raises(HeadError, match=r"input of shape \(2, 900, 8\); expected \[N, D\]"):
            Classifier(tokens, mean=0, std=1).features(random_images())

    @pytest.mark.parametrize(
        ("compute", "times"),
        [
            (lambda self, z: (self.fc(z) + self.fc(-z)) / 2, 2),
            (lambda self, z: F.linear(z, self.fc.weight, self.fc.bias), 0),
        ],
    )
    def test_head_must_run_once(self, compute: Callable[[Any, Tensor], Tensor], times: int) -> None:
        classifier = Classifier(Named(compute, fc=nn.Linear(8, 4)), mean=0, std=1)
        with pytest.raises(HeadError, match=f"'fc' runs {times} times in a forward pass; it must run once"):
            classifier(random_images())
        assert hooks_of(classifier) == []

    @pytest.mark.parametrize(
        ("compute", "kind"),
        [
            (lambda self, z: {"scores": self.fc(z), "z": z}, "dict of scores, z"),
            (lambda self, z: ([z], self.fc(z)), "tuple"),
            (lambda self, z: (), "tuple"),
            (lambda self, z: None, "NoneType"),
        ],
    )
    def test_output_without_logits(self, compute: Callable[[Any, Tensor], Any], kind: str) -> None:
        classifier = Classifier(Named(compute, fc=nn.Linear(8, 4)), mean=0, std=1)
        with pytest.raises(
            HeadError, match=rf"model returns {kind}; expected a tensor, an object with \.logits, a dict"
        ):
            classifier(random_images())

    def test_a_tuple_that_begins_with_features(self) -> None:
        classifier = Classifier(Named(lambda self, z: (z, self.fc(z)), fc=nn.Linear(8, 4)), mean=0, std=1)
        with pytest.raises(HeadError, match="output of 'fc' is not the model's output"):
            classifier(random_images())

    def test_not_a_module(self, tiny_classifier: Classifier) -> None:
        with pytest.raises(TypeError, match=r"a ttac\.Classifier already"):
            Classifier(tiny_classifier)
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not str"):
            Classifier("resnet18")  # type: ignore[arg-type]


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class TestPixels:
    def test_timm_supplies_mean_and_std(self) -> None:
        model: Any = of_timm("resnet18")
        classifier = Classifier(model)
        assert classifier.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
        assert classifier.std.flatten().tolist() == pytest.approx([0.229, 0.224, 0.225])
        model.pretrained_cfg = pytest.importorskip("timm").models.PretrainedCfg(mean=MEAN, std=STD)
        assert Classifier(model).mean.flatten().tolist() == pytest.approx(MEAN)
        assert Classifier(model, mean=[0.1]).mean.flatten().tolist() == pytest.approx([0.1])

    def test_raw_pixels_are_said_by_mean_0_and_std_1(self, tiny_classifier: Classifier) -> None:
        assert torch.equal(tiny_classifier(random_images()), tiny_classifier.model(random_images()))

    @pytest.mark.parametrize("said", [{}, {"mean": MEAN}, {"std": 1}])
    def test_nothing_is_guessed(self, said: dict[str, Any]) -> None:
        message = r"^nothing says how ResNet wants .*: give mean=\.\.\., std=\.\.\., or mean=0, std=1 if it takes raw"
        with pytest.raises(ValueError, match=message):
            Classifier(ResNet(8, 10, width=4), **said)

    def test_the_usual_values_are_suggested_where_the_library_is_known(self) -> None:
        message = (
            r"give mean=\[0.485, 0.456, 0.406\], std=\[0.229, 0.224, 0.225\] if it was trained with the usual values"
        )
        with pytest.raises(ValueError, match=message):
            Classifier(of_torchvision("resnet18"))
        with pytest.raises(ValueError, match=r"or mean=0, std=1 .*ttac.load_model reads them from .* image processor"):
            Classifier(of_transformers("ViT", image_size=48, **TINY_VIT))

    @pytest.mark.parametrize("mean", [0.5, 1, torch.tensor(0.5), [0.5], (0.5, 0.5, 0.5), torch.full((3,), 0.5)])
    def test_one_number_stands_for_all_channels(self, mean: Any) -> None:
        network = ResNet(8, 10, width=4).eval()
        classifier = Classifier(network, mean=mean, std=0.25)
        number = float(torch.as_tensor(mean).flatten()[0])
        assert torch.equal(classifier(random_images()), network((random_images() - number) / 0.25))
        assert classifier.channels == 3

    def test_features_have_no_pixels_and_images_are_refused(self) -> None:
        network = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        classifier = Classifier(network, head="2")
        assert torch.equal(classifier(torch.ones(2, 8)), network(torch.ones(2, 8)))
        images = torch.rand(2, 3, 8, 8)
        with pytest.raises(ValueError, match=r"nothing says how .* wants its pixels normalised"):
            classifier(images)
        assert torch.equal(Classifier(network, head="2", mean=0, std=1)(images[:, 0, 0]), network(images[:, 0, 0]))

    def test_timm_with_other_channels_needs_its_own_mean(self) -> None:
        model = of_timm("resnet18", in_chans=1)
        with pytest.raises(ValueError, match=r"mean has 3 values where 1 channels are expected: pass mean and std"):
            Classifier(model)
        images = random_images(channels=1)
        assert torch.equal(Classifier(model, mean=[0.5], std=[0.5]).check(images), images)

    def test_mean_by_hand_outranks_the_first_convolution(self) -> None:
        """A stem that folds pixels into channels has a convolution of more channels than the image."""
        network = nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        network.add_module("fc", nn.Linear(8, 4))
        classifier = Classifier(network, mean=MEAN, std=STD)
        assert classifier.channels == 3
        assert classifier(classifier.check(random_images())).shape == (2, 4)

    def test_channels_are_open_without_a_convolution(self) -> None:
        classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), mean=0, std=1)
        assert classifier(classifier.check(random_images(side=8, channels=1))).shape == (2, 4)

    @pytest.mark.parametrize("std", [(0.2, 0.0, 0.2), (0.2, -1.0, 0.2), (0.2, float("nan"), 0.2)])
    def test_std_must_be_positive(self, std: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="std must be positive"):
            Classifier(ResNet(8, 10, width=4), mean=MEAN, std=std)

    def test_std_of_another_length(self) -> None:
        with pytest.raises(ValueError, match="std has 2 values where 3 channels are expected"):
            Classifier(ResNet(8, 10, width=4), mean=MEAN, std=(1.0, 1.0))

    def test_check_is_on_the_classifier(self, tiny_classifier: Classifier) -> None:
        with pytest.raises(ValueError, match="images have 1 channels; the model takes 3"):
            tiny_classifier.check(random_images(channels=1))


class TestPrecisionAndDevice:
    def test_pixels_are_normalised_before_the_cast(self) -> None:
        classifier = Classifier(ResNet(8, 10, width=4), mean=MEAN, std=STD).eval().to(torch.bfloat16)
        assert classifier.mean.dtype == classifier.std.dtype == torch.float32
        assert classifier.mean.flatten().tolist() == pytest.approx(MEAN, rel=1e-6)
        images = random_images()
        features, logits = classifier.features_and_logits(images)
        assert features.dtype == logits.dtype == torch.bfloat16
        assert torch.equal(logits, classifier.model(normalised(images).bfloat16()))

    def test_bfloat16_from_the_start(self) -> None:
        model = of_timm("vit_tiny_patch16_224", img_size=32).to(torch.bfloat16).eval()
        classifier = Classifier(model, mean=MEAN, std=STD)
        images = random_images()
        assert torch.equal(classifier(images), model(normalised(images).bfloat16()))
        assert classifier(images.bfloat16()).dtype == torch.bfloat16

    def test_float64(self) -> None:
        classifier = Classifier(ResNet(8, 10, width=4), mean=MEAN, std=STD).eval().double()
        expected = classifier.model(normalised(random_images()).double())
        torch.testing.assert_close(classifier(random_images()), expected, rtol=1e-6, atol=1e-6)

    def test_input_takes_the_dtype_of_the_first_layer(self) -> None:
        """A head kept in float32 behind a bfloat16 backbone."""
        network = Named(lambda self, z: self.fc(z.float()), fc=nn.Linear(8, 4))
        network.stem.to(torch.bfloat16)
        features, logits = Classifier(network, mean=0, std=1).features_and_logits(random_images())
        assert features.dtype == logits.dtype == torch.float32

    def test_moves_to_another_device(self, tiny_classifier: Classifier) -> None:
        tiny_classifier(random_images())
        moved = tiny_classifier.copy().to("meta")
        assert moved.mean.device.type == moved.std.device.type == "meta"
        features, logits = moved.features_and_logits(moved.check(random_images()))
        assert features.device.type == logits.device.type == "meta"
        assert (features.shape, logits.shape) == ((2, 16), (2, 10))

    @pytest.mark.parametrize(
        "norm", [nn.BatchNorm2d, lambda width: nn.GroupNorm(2, width), lambda width: nn.GroupNorm(1, width)]
    )
    def test_norm_layers_in_train_mode(self, norm: Callable[[int], nn.Module]) -> None:
        """One forward pass a call: batch statistics move once, and the split holds while they move."""
        classifier = Classifier(ResNet(8, 10, width=4, norm=norm), mean=0, std=1).train()
        features, logits = classifier.features_and_logits(random_images())
        torch.testing.assert_close(classifier.logits(features), logits)
        tracked = [int(tensor) for name, tensor in classifier.state_dict().items() if "num_batches" in name]
        assert tracked == [1] * (9 if norm is nn.BatchNorm2d else 0)

    def test_undefined_logits_are_no_matter_of_the_head(self, tiny_classifier: Classifier) -> None:
        nn.init.constant_(tiny_classifier.head.weight, float("nan"))
        assert tiny_classifier(random_images()).isnan().all()


class TestFingerprint:
    def test_same_for_copies_builds_and_memory_formats(self, tiny_classifier: Classifier) -> None:
        expected = tiny_classifier.fingerprint()
        assert tiny_classifier.copy().fingerprint() == expected
        torch.manual_seed(1)
        rebuilt = Classifier(ResNet(8, 10, width=4), mean=0, std=1)
        assert rebuilt.fingerprint() != expected
        rebuilt.load_state_dict(tiny_classifier.state_dict())
        assert rebuilt.fingerprint() == expected
        assert rebuilt.to(memory_format=torch.channels_last).requires_grad_(False).fingerprint() == expected
        rebuilt(random_images())
        assert rebuilt.eval().fingerprint() != expected, "a pass in train mode moves the batch statistics"

    def test_changes_with_every_tensor(self, tiny_classifier: Classifier) -> None:
        names = list(tiny_classifier.state_dict())
        prints = {tiny_classifier.fingerprint()}
        for name in names:
            other = tiny_classifier.copy()
            other.state_dict()[name].view(-1)[-1] += 1
            prints.add(other.fingerprint())
        assert len(prints) == len(names) + 1

    def test_changes_with_pixels_head_and_precision(self) -> None:
        network = plain_network(a=nn.Linear(8, 8), b=nn.Linear(8, 8))
        variants = [
            Classifier(network, head="a", mean=0, std=1),
            Classifier(network, head="b", mean=0, std=1),
            Classifier(network, head="b", mean=MEAN, std=1),
            Classifier(network, head="b", mean=0, std=MEAN),
            Classifier(network, head="b", mean=0, std=1).copy().bfloat16(),
        ]
        assert len({classifier.fingerprint() for classifier in variants}) == len(variants)


class TestProbeImages:
    def test_size_that_a_model_notes(self) -> None:
        assert probe_images(of_torchvision("VisionTransformer", **TV_VIT)).shape == (2, 3, 48, 48)
        assert probe_images(of_transformers("ViT", image_size=48, **TINY_VIT)).shape == (2, 3, 48, 48)

    def test_note_that_is_stale(self) -> None:
        """timm notes 224 pixels and three channels whatever a model was built for."""
        assert probe_images(of_timm("vit_tiny_patch16_224", img_size=64, in_chans=1)).shape == (2, 1, 64, 64)

    def test_grey_images_without_a_convolution(self) -> None:
        network = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 4))
        assert probe_images(network).shape == (2, 1, 28, 28)
        assert Classifier(network, mean=0, std=1).head_name == "3"
