"""Tokenizer for text that is already ids: integers separated by white space."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cached_property

from .base import MegatronTokenizer, TokenizerError, checked_text, not_of_this_text

logger = logging.getLogger(__name__)


class NullTokenizer(MegatronTokenizer):
    """`vocab_size` ids, of which the last ends a document unless told otherwise.

    Older Megatron-LM versions counted the end of document on top (vocabulary = given + 1,
    eod = given), so their padded vocabulary can be one unit of padding larger.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        null_tokenizer_eod_id: int | None = None,
        null_tokenizer_pad_id: int = -1,
    ) -> None:
        if vocab_size < 1:
            raise TokenizerError(f"--vocab-size {vocab_size} is too small; use at least 1")
        eod = vocab_size - 1 if null_tokenizer_eod_id is None else null_tokenizer_eod_id
        if not 0 <= eod < vocab_size:
            raise TokenizerError(
                f"--null-tokenizer-eod-id {eod} is outside --vocab-size {vocab_size}; "
                f"use 0 to {vocab_size - 1}"
            )
        if not -1 <= null_tokenizer_pad_id < vocab_size:
            raise TokenizerError(
                f"--null-tokenizer-pad-id {null_tokenizer_pad_id} is outside --vocab-size "
                f"{vocab_size}; use 0 to {vocab_size - 1}, or -1 for no padding token"
            )
        super().__init__(vocab_size=vocab_size, eod_id=eod, pad_id=null_tokenizer_pad_id)
        self._vocab_size = vocab_size
        self._set_special_ids(eod=eod, pad=null_tokenizer_pad_id)
        logger.info(
            "NullTokenizer: vocabulary %d, eod %d, pad %d", vocab_size, eod, null_tokenizer_pad_id
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @cached_property
    def vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self._vocab_size)}

    def tokenize(self, text: str) -> list[int]:
        words = checked_text(text).split()
        for word in words:
            if not re.fullmatch(r"-?[0-9]+", word):
                raise TokenizerError(
                    f"NullTokenizer reads integers separated by spaces, not {word!r:.60}; "
                    "use another --tokenizer-type for text"
                )
        return self._checked_ids([int(word) for word in words])

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, self._checked_ids(ids)))

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        if list(ids) != self.tokenize(text):
            raise not_of_this_text()
        return [match.start() for match in re.finditer(r"\S+", text)]
