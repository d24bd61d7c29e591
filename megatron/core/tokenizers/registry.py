"""Name -> tokenizer: the one table that `--tokenizer-type` and its error messages come from."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from .base import MegatronTokenizer, TokenizerError
from .gpt2_bpe import GPT2BPETokenizer
from .huggingface import HuggingFaceTokenizer
from .null import NullTokenizer
from .sentencepiece_tokenizers import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from .tiktoken import TikTokenizer

logger = logging.getLogger(__name__)

# A constructor's parameters are named after flags: those without a default are required.
TOKENIZER_TYPES: dict[str, type[MegatronTokenizer]] = {
    tokenizer.__name__: tokenizer
    for tokenizer in (
        GPT2BPETokenizer,
        GPTSentencePieceTokenizer,
        Llama2Tokenizer,
        SentencePieceTokenizer,
        HuggingFaceTokenizer,
        TikTokenizer,
        NullTokenizer,
    )
}

_BERT = "it serves BERT models, and only GPT and Llama shapes are trained here"
_REFUSED_TYPES = {
    "BertWordPieceLowerCase": _BERT,
    "BertWordPieceCase": _BERT,
    "Llama3Tokenizer": "use HuggingFaceTokenizer with --tokenizer-model set to Llama 3's directory",
    "MistralTokenizer": "use HuggingFaceTokenizer, or Llama2Tokenizer with its tokenizer.model",
    "SFTTokenizer": "only pretraining is done here; use HuggingFaceTokenizer",
    "MultimodalTokenizer": "only text is trained on here; use HuggingFaceTokenizer",
    "NullMultimodalTokenizer": "only text is trained on here; use NullTokenizer",
}


def build_tokenizer(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
    **options: Any,
) -> MegatronTokenizer:
    """The tokenizer of that type. An input that the type does not read is left out with a warning.

    `options` are named after their flags (`tiktoken_pattern`, `null_tokenizer_eod_id`, ...); None
    means "not given". Raises TokenizerError for an unknown type or option, a missing input, or a
    `vocab_size` too small for the tokenizer's ids.
    """
    parameters = parameters_of(tokenizer_type)
    inputs = {
        "tokenizer_model": tokenizer_model or None,
        "vocab_file": vocab_file or None,
        "merge_file": merge_file or None,
        "vocab_size": vocab_size,
        "vocab_extra_ids": vocab_extra_ids or None,
    }
    given = {name: value for name, value in {**inputs, **options}.items() if value is not None}
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in given:
            raise TokenizerError(
                f"--tokenizer-type {tokenizer_type} needs {_flag(name)}, which is not given"
            )
    for name in [name for name in given if name not in parameters]:
        if name not in inputs:
            known = ", ".join(map(_flag, parameters))
            raise TokenizerError(
                f"--tokenizer-type {tokenizer_type} has no option {_flag(name)}; it reads {known}"
            )
        if name != "vocab_size":  # checked below instead
            logger.warning("%s is not read by --tokenizer-type %s", _flag(name), tokenizer_type)
    logger.info("> building %s tokenizer ...", tokenizer_type)
    read = {name: value for name, value in given.items() if name in parameters}
    tokenizer = TOKENIZER_TYPES[tokenizer_type](**read)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise TokenizerError(
            f"--vocab-size {vocab_size} is less than the {tokenizer.vocab_size} ids of the "
            f"{tokenizer_type}; leave it out, or use at least {tokenizer.vocab_size}"
        )
    return tokenizer


def parameters_of(tokenizer_type: str) -> Mapping[str, inspect.Parameter]:
    """What that type reads, by name. Raises TokenizerError for a type that is not served."""
    if tokenizer_type in _REFUSED_TYPES:
        reason = _REFUSED_TYPES[tokenizer_type]
        raise TokenizerError(f"--tokenizer-type {tokenizer_type} is not supported: {reason}")
    if tokenizer_type not in TOKENIZER_TYPES:
        raise TokenizerError(
            f"--tokenizer-type {tokenizer_type} is not known; "
            f"choose from {', '.join(TOKENIZER_TYPES)}"
        )
    return inspect.signature(TOKENIZER_TYPES[tokenizer_type]).parameters


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
