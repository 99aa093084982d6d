"""Decoder-only transformers, their initial weights, and their exchange with Hugging Face transformers."""

from __future__ import annotations

from pyfast.models.config import RopeScaling, TransformerConfig
from pyfast.models.generate import generate
from pyfast.models.hugging_face import from_hugging_face, save_hugging_face, to_hugging_face
from pyfast.models.transformer import Transformer

__all__ = [
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "from_hugging_face",
    "generate",
    "save_hugging_face",
    "to_hugging_face",
]
