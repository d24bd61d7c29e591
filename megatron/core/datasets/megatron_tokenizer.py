"""Megatron-LM's import location of the tokenizers' base class."""

from megatron.core.tokenizers.base import MegatronTokenizer as MegatronTokenizer
