"""Any tokenizer of the `transformers` package, from a local directory or by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from .base import MegatronTokenizer, TokenizerError, checked_text, not_of_this_text


class HuggingFaceTokenizer(MegatronTokenizer):
    """`AutoTokenizer`: ids from calling it, so with the special tokens that it adds by itself.

    `eod` is the tokenizer's eos token. Empty text gives just what the tokenizer adds, such as BOS.
    """

    def __init__(
        self,
        tokenizer_model: str,
        *,
        tokenizer_hf_no_use_fast: bool = False,
        tokenizer_hf_no_include_special_tokens: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(
            tokenizer_model,
            use_fast=not tokenizer_hf_no_use_fast,
            include_special_tokens=not tokenizer_hf_no_include_special_tokens,
        )
        try:
            import transformers
        except ImportError as error:
            raise TokenizerError(
                "--tokenizer-type HuggingFaceTokenizer needs the package transformers, which is "
                f"not there ({error}); `pip install transformers` mends it"
            ) from error
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                tokenizer_model,
                use_fast=not tokenizer_hf_no_use_fast,
                trust_remote_code=trust_remote_code,
            )
        except (OSError, ValueError, ImportError) as error:
            raise TokenizerError(
                f"--tokenizer-model {tokenizer_model} cannot be loaded by transformers; give a "
                f"directory that holds a tokenizer, or a name that it can fetch: {error}"
            ) from error
        self._add_special_tokens = not tokenizer_hf_no_include_special_tokens
        own = self._tokenizer
        self._set_special_ids(
            eod=own.eos_token_id,
            eos=own.eos_token_id,
            bos=own.bos_token_id,
            pad=own.pad_token_id,
            cls=own.cls_token_id,
            sep=own.sep_token_id,
            mask=own.mask_token_id,
        )

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def tokenize(self, text: str) -> list[int]:
        encoded = self._tokenizer(checked_text(text), add_special_tokens=self._add_special_tokens)
        return list(encoded["input_ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(self._checked_ids(ids)))

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """As the base class says; a token that the tokenizer added is said to start at 0."""
        if not self._tokenizer.is_fast:
            raise TokenizerError(
                "a slow Hugging Face tokenizer cannot tell where its tokens start; "
                "leave --tokenizer-hf-no-use-fast out"
            )
        encoded = self._tokenizer(
            checked_text(text),
            add_special_tokens=self._add_special_tokens,
            return_offsets_mapping=True,
        )
        if list(ids) != list(encoded["input_ids"]):
            raise not_of_this_text()
        return [start for start, _ in encoded["offset_mapping"]]
