"""Choices that Megatron spells as enums."""

from __future__ import annotations

import enum


class AttnMaskType(enum.Enum):
    """Which keys a query sees when no mask is passed; a mask that is passed says all of it."""

    padding = 1  # without a mask: all keys
    causal = 2
    no_mask = 3
    padding_causal = 4  # without a mask: as causal

    @property
    def is_causal(self) -> bool:
        return self in (AttnMaskType.causal, AttnMaskType.padding_causal)
