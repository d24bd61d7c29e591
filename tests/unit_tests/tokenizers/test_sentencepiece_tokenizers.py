"""The three SentencePiece types, over small models trained here."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron.core.tokenizers import MegatronTokenizer, TokenizerError, build_tokenizer

TYPES = ["GPTSentencePieceTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer"]


def build(name: str, model: str, **options: Any) -> MegatronTokenizer:
    return build_tokenizer(name, tokenizer_model=model, **options)


@pytest.mark.parametrize("name", TYPES)
def test_plain_text_gives_the_models_ids(name: str, plain_model: str) -> None:
    text = "hello the quick 你好 naïve"
    ids = sentencepiece.SentencePieceProcessor(model_file=plain_model).encode(text)
    tokenizer = build(name, plain_model)
    assert tokenizer.tokenize(text) == ids
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.inv_vocab[ids[0]].startswith("▁")
    assert all(tokenizer.vocab[tokenizer.inv_vocab[number]] == number for number in ids)


@pytest.mark.parametrize("name", TYPES)
def test_offsets_point_at_the_text(name: str, llama_model: str) -> None:
    text = "hello  the quick 你好"
    tokenizer = build(name, llama_model)
    ids = tokenizer.tokenize(text)
    starts = tokenizer.offsets(ids, text)
    ends = [*starts[1:], len(text)]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    assert "".join(pieces) == text
    spelled = [tokenizer.inv_vocab[number].replace("▁", " ") for number in ids]
    assert [piece.strip() for piece in pieces] == [token.strip() for token in spelled]
    with pytest.raises(TokenizerError, match="not the tokens of this text"):
        tokenizer.offsets(ids, "the")


@pytest.mark.parametrize("name", TYPES)
def test_empty_blank_and_nul(name: str, plain_model: str, llama_model: str) -> None:
    plain, llama = build(name, plain_model), build(name, llama_model)
    assert plain.tokenize("") == llama.tokenize("") == []
    assert plain.detokenize([]) == ""
    blank = "  \n\t "
    assert plain.tokenize(blank) == []  # SentencePiece's default normalisation drops blanks
    assert llama.detokenize(llama.tokenize(blank)) == blank  # Llama's keeps them
    assert plain.vocab["<unk>"] in plain.tokenize("a\x00b")
    assert llama.detokenize(llama.tokenize("a\x00b")) == "a\x00b"  # byte fallback


@pytest.mark.parametrize("name", TYPES)
def test_lone_surrogates_and_other_types_are_refused(name: str, plain_model: str) -> None:
    tokenizer = build(name, plain_model)
    with pytest.raises(TokenizerError, match=r"character 1 is the lone surrogate '\\ud800'"):
        tokenizer.tokenize("a\ud800")
    with pytest.raises(TokenizerError, match="takes text, not NoneType"):
        tokenizer.tokenize(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("number", [-1, 100_000])
def test_ids_outside_the_vocabulary_are_refused(name: str, number: int, plain_model: str) -> None:
    with pytest.raises(TokenizerError, match=f"id {number} is outside the vocabulary"):
        build(name, plain_model).detokenize([number])


@pytest.mark.parametrize("name", TYPES)
def test_survives_pickling(name: str, plain_model: str) -> None:
    tokenizer = build(name, plain_model)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.tokenize("hello world") == tokenizer.tokenize("hello world")


@pytest.mark.parametrize("name", TYPES)
def test_identifiers_name_class_and_inputs(name: str, plain_model: str) -> None:
    identifiers = build(name, plain_model).unique_identifiers
    assert list(identifiers)[:2] == ["class", "tokenizer_path"]
    assert identifiers["class"] == name
    assert json.loads(json.dumps(identifiers)) == identifiers
    assert identifiers["tokenizer_path"] == [plain_model]


@pytest.mark.parametrize("name", TYPES[:2])
def test_special_ids_are_the_models(name: str, plain_model: str) -> None:
    tokenizer = build(name, plain_model)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.pad) == (1, 2, 2, -1)
    assert tokenizer.vocab_size == 120
    assert not hasattr(tokenizer, "mask")


@pytest.mark.parametrize("name", TYPES[:2])
def test_a_model_without_eos_says_so(name: str, bare_model: str) -> None:
    tokenizer = build(name, bare_model)
    assert tokenizer.tokenize("hello")
    with pytest.raises(TokenizerError, match=rf"{name} \(.*bare.model\) has no eod token"):
        _ = tokenizer.eod


def test_llama2_adds_bos_and_eos_only_when_asked(llama_model: str) -> None:
    tokenizer = build("Llama2Tokenizer", llama_model)
    ids = tokenizer.tokenize("hello world")
    assert tokenizer.bos not in ids and tokenizer.eos not in ids
    assert tokenizer.tokenize("hello world", bos=True, eos=True) == [1, *ids, 2]  # type: ignore[call-arg]
    assert tokenizer.tokenize("", bos=True) == [1]  # type: ignore[call-arg]


def test_special_tokens_follow_the_models_ids(plain_model: str) -> None:
    tokenizer = build("SentencePieceTokenizer", plain_model, vocab_extra_ids=2)
    added = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<extra_id_0>", "<extra_id_1>"]
    assert [tokenizer.inv_vocab[number] for number in range(120, 127)] == added
    assert tokenizer.vocab_size == 127
    roles = (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask, tokenizer.pad)
    assert roles == (120, 121, 122, 123, 124)
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)  # the model's own <s> and </s>


def test_names_that_the_model_lacks_are_added(bare_model: str) -> None:
    tokenizer = build("SentencePieceTokenizer", bare_model)
    size = sentencepiece.SentencePieceProcessor(model_file=bare_model).get_piece_size()
    names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<BOS>", "<EOS>"]
    assert [tokenizer.vocab[name] for name in names] == list(range(size, size + 7))


def test_special_tokens_that_the_model_has_keep_their_ids(marked_model: str) -> None:
    tokenizer = build("SentencePieceTokenizer", marked_model, vocab_extra_ids=1)
    model = sentencepiece.SentencePieceProcessor(model_file=marked_model)
    assert tokenizer.eod == model.piece_to_id("<EOD>") < model.get_piece_size()
    assert tokenizer.pad == 3
    assert tokenizer.vocab_size == model.get_piece_size() + 3  # <CLS>, <SEP>, <MASK>


def test_special_tokens_are_recognised_inside_text(plain_model: str) -> None:
    tokenizer = build("SentencePieceTokenizer", plain_model, vocab_extra_ids=11)
    model = sentencepiece.SentencePieceProcessor(model_file=plain_model)
    text = "hello <MASK> world<extra_id_10></s><EOD>"
    vocab = tokenizer.vocab
    ids = tokenizer.tokenize(text)
    assert ids == [
        *model.encode("hello"),
        vocab["<MASK>"],
        *model.encode("world"),
        vocab["<extra_id_10>"],
        vocab["</s>"],
        vocab["<EOD>"],
    ]
    assert tokenizer.detokenize(ids) == "hello <MASK> world <extra_id_10> </s> <EOD>"
    starts = tokenizer.offsets(ids, text)
    assert starts[ids.index(vocab["<MASK>"])] == text.index("<MASK>")
    assert starts[ids.index(vocab["<EOD>"])] == text.index("<EOD>")
    assert text[starts[ids.index(vocab["<MASK>"]) + 1] :].lstrip().startswith("world")


@pytest.mark.parametrize("name", TYPES)
def test_files_that_are_no_model(name: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"--tokenizer-model .*none is not a file"):
        build(name, str(tmp_path / "none"))
    (tmp_path / "text.model").write_text("no model")
    with pytest.raises(TokenizerError, match="is not a SentencePiece model"):
        build(name, str(tmp_path / "text.model"))


def test_negative_extra_ids_are_refused(plain_model: str) -> None:
    with pytest.raises(TokenizerError, match="--vocab-extra-ids -1 is below 0"):
        build("SentencePieceTokenizer", plain_model, vocab_extra_ids=-1)
