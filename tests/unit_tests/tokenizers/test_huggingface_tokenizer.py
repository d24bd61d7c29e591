"""HuggingFaceTokenizer over a small tokenizer saved in a local directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.core.tokenizers import TokenizerError, build_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A word-level tokenizer that puts <s> in front by itself, saved as transformers does."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<s>", "</s>", "<pad>", "<unk>", "hello", "world", "!"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    path = tmp_path_factory.mktemp("hf")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(str(path))
    return str(path)


def test_ids_hold_the_special_tokens_that_it_adds(folder: str) -> None:
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=folder)
    assert tokenizer.tokenize("hello world!") == [0, 4, 5, 6]
    assert tokenizer.tokenize("") == [0]
    assert tokenizer.tokenize(" \n ") == [0]
    assert tokenizer.tokenize("\x00") == [0, 3]
    assert tokenizer.offsets([0, 4, 5, 6], "hello world!") == [0, 0, 6, 11]
    assert tokenizer.detokenize([4, 5]) == "hello world"


def test_special_tokens_can_be_left_out(folder: str) -> None:
    tokenizer = build_tokenizer(
        "HuggingFaceTokenizer",
        tokenizer_model=folder,
        tokenizer_hf_no_include_special_tokens=True,
    )
    assert tokenizer.tokenize("hello world!") == [4, 5, 6]
    assert tokenizer.tokenize("") == []
    assert tokenizer.unique_identifiers["include_special_tokens"] is False


def test_special_ids_and_vocabulary(folder: str) -> None:
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=folder)
    ids = (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.pad)
    assert ids == (0, 1, 1, 2)
    assert tokenizer.vocab_size == 7
    assert tokenizer.vocab["world"] == 5 and tokenizer.inv_vocab[5] == "world"
    with pytest.raises(TokenizerError, match="has no mask token"):
        _ = tokenizer.mask


def test_hostile_input_is_refused(folder: str) -> None:
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=folder)
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.tokenize("\ud800")
    with pytest.raises(TokenizerError, match="id 7 is outside the vocabulary"):
        tokenizer.detokenize([7])
    with pytest.raises(TokenizerError, match="not the tokens of this text"):
        tokenizer.offsets([4], "world")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TokenizerError, match=r"--tokenizer-model .* cannot be loaded"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match=r"needs the package transformers.*pip install"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model="gpt2")
