"""Image towers with texts for classes: the head is the texts, and it adapts as any other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ttac
from ttac import checks

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
PIXELS = transformers.CLIPImageProcessor(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.25, 0.3])
TEXTS = ["a photo of a cat", "a photo of a dog", "a fox"]


class Tokens:
    """A processor whose tokens are the letters."""

    image_processor = PIXELS

    def __init__(self) -> None:
        self.paddings: list[object] = []

    def __call__(self, text: list[str], padding: object, truncation: bool, return_tensors: str) -> dict[str, Tensor]:
        self.paddings.append(padding)
        longest = 12
        rows = [[2 + ord(letter) % 90 for letter in one][: longest - 1] for one in text]
        ids = torch.tensor([[*row, *[98] * (longest - len(row))] for row in rows])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture
def clip() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.CLIPConfig(
            text_config={**SMALL, "vocab_size": 99, "eos_token_id": 98, "max_position_embeddings": 16},
            vision_config={**SMALL, "image_size": 32, "patch_size": 8},
            projection_dim=12,
        )
        return transformers.CLIPModel(config).eval()


def images(count: int = 4) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def scores(model: Any, texts: list[str]) -> Tensor:
    """What the whole model says, by its own forward pass."""
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (PIXELS.image_mean, PIXELS.image_std))
    tokens = Tokens()(texts, True, True, "pt")
    with torch.no_grad():
        return model(pixel_values=(images() - mean) / std, **tokens).logits_per_image


def test_it_scores_as_the_whole_model_does(clip: Any) -> None:
    classifier = ttac.zero_shot(clip, Tokens(), TEXTS)
    assert (classifier.num_classes, classifier.feature_dim, classifier.has_linear_head) == (3, 12, True)
    torch.testing.assert_close(classifier(images()), scores(clip, TEXTS))
    assert torch.allclose(classifier.features(images()).norm(dim=1), torch.ones(4))
    assert not [name for name, _ in classifier.named_parameters() if "text" in name]


def test_siglip_with_its_bias_and_padding() -> None:
    config = transformers.SiglipConfig(
        text_config={**SMALL, "vocab_size": 99, "max_position_embeddings": 12},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
    )
    torch.manual_seed(0)
    model = transformers.SiglipModel(config).eval()
    nn.init.constant_(model.logit_bias, -3.0)
    processor = Tokens()
    classifier = ttac.zero_shot(model, processor, TEXTS)
    torch.testing.assert_close(classifier(images()), scores(model, TEXTS))
    assert processor.paddings == ["max_length"]


def test_several_prompts_of_a_class_are_averaged(clip: Any) -> None:
    prompts = {"cat": ["a photo of a cat", "a cat"], "dog": ["a dog"]}
    classifier = ttac.zero_shot(clip, Tokens(), prompts)
    single = [ttac.zero_shot(clip, Tokens(), [text]).head.weight / clip.logit_scale.exp() for text in prompts["cat"]]
    expected = F.normalize(torch.stack(single).mean(0), dim=1) * clip.logit_scale.exp()
    torch.testing.assert_close(classifier.head.weight[:1], expected)
    assert classifier.num_classes == 2


def test_ids_and_embeddings_from_elsewhere(clip: Any) -> None:
    by_text = ttac.zero_shot(clip, Tokens(), TEXTS)
    ids = Tokens()(TEXTS, True, True, "pt")["input_ids"]
    torch.testing.assert_close(ttac.zero_shot(clip, PIXELS, ids).head.weight, by_text.head.weight)
    embeddings = 7 * by_text.head.weight.detach()  # of any length
    torch.testing.assert_close(ttac.zero_shot(clip, PIXELS, embeddings).head.weight, by_text.head.weight)


@pytest.mark.parametrize("method", ["ttac++", "shot", "tent"])
def test_methods_keep_their_promises(clip: Any, method: str) -> None:
    classifier = ttac.zero_shot(clip, Tokens(), TEXTS)
    subject = checks.subject(method, classifier, side=32)
    checks.batches_do_not_matter(subject)
    checks.only_declared_parameters_move(subject)
    assert ttac.SourceStatistics.infer(classifier).classes.mean.shape == (3, 12)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("a photo of a cat", "one text for each class"),
        ([], "one text for each class"),
        ({"cat": []}, "every class needs a prompt"),
        (torch.zeros(3), r"expected ids \[K, T\] or embeddings \[K, D\]"),
        (torch.full((2, 12), float("nan")), "NaN or infinity"),
    ],
)
def test_prompts_that_make_no_sense(clip: Any, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ttac.zero_shot(clip, Tokens(), prompts)


def test_models_and_processors_that_do_not_fit(clip: Any) -> None:
    with pytest.raises(TypeError, match=r"Linear has no image tower .* use ttac.Classifier or ttac.load_model"):
        ttac.zero_shot(nn.Linear(2, 2), Tokens(), TEXTS)
    with pytest.raises(ValueError, match="SimpleNamespace says nothing of pixels"):
        ttac.zero_shot(clip, SimpleNamespace(), torch.ones(2, 12))
