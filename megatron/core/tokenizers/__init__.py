"""Tokenizers: text to ids and back. `build_tokenizer(type, ...)` makes one."""

from .base import MegatronTokenizer, MissingTokenError, TokenizerError
from .registry import TOKENIZER_TYPES, build_tokenizer

__all__ = [
    "TOKENIZER_TYPES",
    "MegatronTokenizer",
    "MissingTokenError",
    "TokenizerError",
    "build_tokenizer",
]
