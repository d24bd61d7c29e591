"""Kinds of models, under Megatron's names."""

import enum


class ModelType(enum.Enum):
    """What a training script trains; every model here is a decoder."""

    encoder_or_decoder = 1
