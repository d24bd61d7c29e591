"""Tokenizers from command line arguments: `build_tokenizer(args)`; sets nothing global."""

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

__all__ = ["build_tokenizer"]
