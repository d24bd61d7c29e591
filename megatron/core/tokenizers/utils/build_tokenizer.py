"""Megatron-LM's way to build a tokenizer: from a namespace with the flags' names."""

from __future__ import annotations

from typing import Any

from .. import registry
from ..base import MegatronTokenizer, TokenizerError

_INPUTS = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size", "vocab_extra_ids")


def build_tokenizer(args: Any) -> MegatronTokenizer:
    """The tokenizer that `args` (any object with flags as attributes) asks for.

    Attributes that are absent or None count as not given. Nothing is written to `args`.
    """
    tokenizer_type = getattr(args, "tokenizer_type", None)
    if tokenizer_type is None:
        raise TokenizerError(
            "--tokenizer-type is not given; choose from " + ", ".join(registry.TOKENIZER_TYPES)
        )
    names = [*_INPUTS, *registry.parameters_of(tokenizer_type)]
    values: dict[str, Any] = {name: getattr(args, name, None) for name in names}
    values["vocab_extra_ids"] = values["vocab_extra_ids"] or 0
    return registry.build_tokenizer(tokenizer_type, **values)
