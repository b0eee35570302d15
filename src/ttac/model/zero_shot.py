"""Classifiers of models that compare images with texts, such as CLIP: what each class is called becomes the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttac.model.classifier import Classifier
from ttac.model.heads import HeadError, evaluating, first_parameter
from ttac.model.processors import read_processor

Prompts = Sequence[str] | Mapping[str, Sequence[str]] | Tensor


def zero_shot(model: nn.Module, processor: Any, prompts: Prompts) -> Classifier:
    """Make a classifier of a model of transformers with an image and a text tower (CLIP, SigLIP, ALIGN).

    `prompts` are texts, one for each class in their order; several for each class, by its name, whose embeddings are
    averaged; or what was made of texts elsewhere: token ids `[K, T]`, or embeddings `[K, D]`. The head's rows are the
    normalised embeddings times the model's temperature, its input is the normalised embedding of the image. The
    classifier shares the image tower with the model and needs neither the text tower nor the processor any more.
    """
    if not (hasattr(model, "vision_model") and hasattr(model, "get_text_features") and hasattr(model, "logit_scale")):
        raise TypeError(
            f"{type(model).__name__} has no image tower (vision_model), text tower (get_text_features) and temperature "
            "(logit_scale), as CLIP of transformers has: for a plain classifier use ttac.Classifier or ttac.load_model"
        )
    with evaluating(model), torch.no_grad():
        rows = F.normalize(_embeddings(model, processor, prompts), dim=-1) * model.logit_scale.exp()  # type: ignore[operator]
    if not bool(rows.isfinite().all()):
        raise ValueError("the text embeddings have NaN or infinity")
    bias = getattr(model, "logit_bias", None)
    pixels = read_processor(getattr(processor, "image_processor", processor)).pixels
    return Classifier(_ZeroShot(model, rows, bias), "head", mean=pixels.mean, std=pixels.std).eval()


class _ZeroShot(nn.Module):
    """An image tower, and a linear head on its normalised embeddings."""

    def __init__(self, model: Any, rows: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.vision_model = model.vision_model
        self.visual_projection = getattr(model, "visual_projection", nn.Identity())  # SigLIP has none
        self.head = nn.Linear(rows.shape[1], len(rows), bias=bias is not None, device=rows.device, dtype=rows.dtype)
        with torch.no_grad():
            self.head.weight.copy_(rows)
            if bias is not None:
                self.head.bias.copy_(bias.expand(len(rows)))

    def forward(self, images: Tensor) -> Tensor:
        """Score pixels that are normalised: `[N, C, H, W] -> [N, K]`."""
        pooled = self.vision_model(pixel_values=images).pooler_output
        return self.head(F.normalize(self.visual_projection(pooled), dim=-1))


def _embeddings(model: Any, processor: Any, prompts: Prompts) -> Tensor:
    """Give one embedding for each class: `[K, D]`."""
    if isinstance(prompts, Mapping):
        names = [text for texts in prompts.values() for text in texts]
        if not all(len(texts) for texts in prompts.values()):
            raise ValueError("every class needs a prompt")
        parts = F.normalize(_text_features(model, _tokens(model, processor, names)), dim=-1)
        return torch.stack([part.mean(0) for part in parts.split([len(texts) for texts in prompts.values()])])
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2:
            raise ValueError(f"prompts have shape {tuple(prompts.shape)}; expected ids [K, T] or embeddings [K, D]")
        given = prompts.to(first_parameter(model).device)
        if given.is_floating_point():
            return given.to(first_parameter(model).dtype)
        return _text_features(model, {"input_ids": given})
    if isinstance(prompts, str) or not prompts:
        raise ValueError("prompts are one text for each class, such as ['a photo of a cat', 'a photo of a dog']")
    return _text_features(model, _tokens(model, processor, list(prompts)))


def _tokens(model: Any, processor: Any, texts: list[str]) -> Mapping[str, Tensor]:
    # SigLIP was trained on texts of full length.
    padding = "max_length" if model.config.model_type.startswith("siglip") else True
    tokens: Mapping[str, Tensor] = processor(text=texts, padding=padding, truncation=True, return_tensors="pt")
    return {name: ids.to(first_parameter(model).device) for name, ids in tokens.items()}


def _text_features(model: Any, tokens: Mapping[str, Tensor]) -> Tensor:
    features = model.get_text_features(**tokens)
    features = getattr(features, "pooler_output", features)  # since version 5 of transformers
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise HeadError(f"{type(model).__name__} gives no text embeddings [K, D]")
    return features
