"""NullTokenizer: integers in, integers out."""

from __future__ import annotations

import logging

import pytest

from megatron.core.tokenizers import TokenizerError, build_tokenizer


def test_ids_are_the_integers_of_the_text() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=128)
    assert tokenizer.tokenize(" 5 7\n0\t127 ") == [5, 7, 0, 127]
    assert tokenizer.detokenize([5, 7, 0, 127]) == "5 7 0 127"
    assert tokenizer.offsets([5, 17], " 5  17") == [1, 4]
    assert tokenizer.tokenize("") == tokenizer.tokenize(" \n") == []
    assert tokenizer.vocab["7"] == 7 and tokenizer.inv_vocab[7] == "7"


def test_defaults_are_those_of_megatron_today_and_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="megatron"):
        tokenizer = build_tokenizer("NullTokenizer", vocab_size=128)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (128, 127, -1)
    assert "> building NullTokenizer tokenizer ..." in caplog.messages
    assert "NullTokenizer: vocabulary 128, eod 127, pad -1" in caplog.messages


def test_ids_can_be_chosen() -> None:
    tokenizer = build_tokenizer(
        "NullTokenizer", vocab_size=128, null_tokenizer_eod_id=0, null_tokenizer_pad_id=1
    )
    assert (tokenizer.eod, tokenizer.pad) == (0, 1)
    assert tokenizer.unique_identifiers["eod_id"] == 0


@pytest.mark.parametrize("text", ["a", "1 b", "1.5", "1_0", "٣", "\x00", "--1"])
def test_words_are_refused(text: str) -> None:
    with pytest.raises(TokenizerError, match="reads integers separated by spaces"):
        build_tokenizer("NullTokenizer", vocab_size=128).tokenize(text)


@pytest.mark.parametrize("text", ["128", "-1"])
def test_ids_outside_the_vocabulary_are_refused(text: str) -> None:
    with pytest.raises(TokenizerError, match=f"id {text} is outside .* 0 to 127"):
        build_tokenizer("NullTokenizer", vocab_size=128).tokenize(text)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(TokenizerError, match="lone surrogate"):
        build_tokenizer("NullTokenizer", vocab_size=128).tokenize("1 \ud800")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "--vocab-size 0 is too small"),
        ({"vocab_size": 8, "null_tokenizer_eod_id": 8}, "--null-tokenizer-eod-id 8 is outside"),
        ({"vocab_size": 8, "null_tokenizer_pad_id": 9}, "--null-tokenizer-pad-id 9 is outside"),
    ],
)
def test_bad_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer("NullTokenizer", **options)  # type: ignore[arg-type]
