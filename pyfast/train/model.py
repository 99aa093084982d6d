"""From the run's config to the model's."""

from __future__ import annotations

import dataclasses

from pyfast.models import TransformerConfig
from pyfast.train.config import TrainConfig
from pyfast.train.errors import ConfigError
from pyfast.train.tokenizer import Tokenizer


def transformer_config(config: TrainConfig, tokenizer: Tokenizer) -> TransformerConfig:
    """The model of a run: the `model` keys, with the tokenizer's vocabulary and the run's sequence length filled in.

    Raises `ConfigError` for a vocabulary smaller than the tokenizer's, ValueError for keys that contradict each other.
    """
    values = {item.name: getattr(config.model, item.name) for item in dataclasses.fields(config.model)}
    if values["vocab"] is None:
        values["vocab"] = tokenizer.vocab_size
    elif values["vocab"] < tokenizer.vocab_size:
        raise ConfigError(
            "model.vocab",
            values["vocab"],
            f"must be at least {tokenizer.vocab_size}, the ids of data.tokenizer = {tokenizer.name}",
        )
    length = config.train.sequence_length
    if values["max_positions"] is None:
        values["max_positions"] = length
    elif values["max_positions"] < length:
        raise ConfigError(
            "model.max_positions", values["max_positions"], f"must be at least train.sequence_length = {length}"
        )
    return TransformerConfig(**values)
