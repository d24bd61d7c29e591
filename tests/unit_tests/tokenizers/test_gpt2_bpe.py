"""GPT-2's byte-level BPE against hand-made examples and Hugging Face's tokenizer."""

from __future__ import annotations

import json
import pickle
import random
import unicodedata
from pathlib import Path

import pytest

from megatron.core.tokenizers import TokenizerError, build_tokenizer
from megatron.core.tokenizers.gpt2_bpe import GPT2BPETokenizer, byte_alphabet, merge_pairs

NASTY = [
    "",
    " ",
    " \t\n  \r\n ",
    "\x00",
    "a\x00b",
    "hello  the hello<|endoftext|> the",
    "<|endoftext|><|endoftext|>",
    "<|endoftext| >",
    "don't DON'T we'll 'tis",
    "12 12345 ¹²³ ٣٤",
    "é e\u0301 你好世界 мир",
    "😀👩‍👩‍👧 🇺🇳",
    "\u2028\u3000\xa0x\x85y\x1cz",
    "\U0010ffff\ufffe\ufeff",
    "ﬁ ①  ß",
]


@pytest.fixture(scope="module")
def tokenizer(gpt2_files: tuple[str, str]) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*gpt2_files)


def random_texts(count: int) -> list[str]:
    rng = random.Random(1234)
    words = [
        "the",
        "hello",
        " ",
        "  ",
        "\n\n",
        "é",
        "你好",
        "мир",
        "😀",
        "'t",
        "12",
        "\x00",
        "\xa0",
    ]
    texts = []
    for _ in range(count):
        points = [rng.choice((rng.randrange(0x250), rng.randrange(0x110000))) for _ in range(8)]
        # Neither surrogates nor code points that only newer Unicode versions assign.
        wild = [c for c in map(chr, points) if unicodedata.category(c) not in ("Cs", "Cn")]
        texts.append("".join(rng.choice((*words, *wild)) for _ in range(rng.randrange(12))))
    return texts


def test_ids_equal_hugging_face(tokenizer: GPT2BPETokenizer, gpt2_files: tuple[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.GPT2Tokenizer.from_pretrained(str(Path(gpt2_files[0]).parent))
    assert len(reference) == tokenizer.vocab_size
    for text in [*NASTY, *random_texts(2000)]:
        expected = reference(text, return_offsets_mapping=True)
        ids = tokenizer.tokenize(text)
        assert ids == expected["input_ids"], repr(text)
        starts = [start for start, _ in expected["offset_mapping"]]
        assert tokenizer.offsets(ids, text) == starts, repr(text)


def test_merges_by_hand(tokenizer: GPT2BPETokenizer) -> None:
    inverse = tokenizer.inv_vocab
    tokens = [inverse[number] for number in tokenizer.tokenize("hello the there in1234")]
    assert tokens == ["hello", "Ġthe", "Ġthe", "re", "Ġ", "in", "12", "3", "4"]


def test_text_survives_a_round_trip(tokenizer: GPT2BPETokenizer) -> None:
    for text in [*NASTY, *random_texts(300)]:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_remembered_words_give_the_same_ids(gpt2_files: tuple[str, str]) -> None:
    fresh = GPT2BPETokenizer(*gpt2_files)
    first = fresh.tokenize("hello the hello")
    assert fresh.tokenize("hello the hello") == first
    single = fresh.tokenize("hello")
    single.append(7)  # a caller may change its list; what is remembered must not follow
    assert fresh.tokenize("hello") == single[:-1]


def test_end_token(tokenizer: GPT2BPETokenizer) -> None:
    assert tokenizer.eod == tokenizer.vocab_size - 1 == tokenizer.vocab["<|endoftext|>"]
    assert tokenizer.tokenize("<|endoftext|>") == [tokenizer.eod]
    assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"
    assert not hasattr(tokenizer, "pad")


def test_half_a_character_becomes_a_replacement(tokenizer: GPT2BPETokenizer) -> None:
    half = tokenizer.vocab[byte_alphabet()[0xC3]]
    assert tokenizer.detokenize([half]) == "\ufffd"


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffcd"])
def test_lone_surrogates_are_refused(tokenizer: GPT2BPETokenizer, text: str) -> None:
    position = 2 if text.startswith("ab") else 0
    with pytest.raises(TokenizerError, match=rf"character {position} is the lone surrogate"):
        tokenizer.tokenize(text)


def test_offsets_refuse_ids_of_another_text(tokenizer: GPT2BPETokenizer) -> None:
    with pytest.raises(TokenizerError, match="not the tokens of this text"):
        tokenizer.offsets(tokenizer.tokenize("hello"), "hullo")


@pytest.mark.parametrize("number", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: GPT2BPETokenizer, number: int) -> None:
    with pytest.raises(TokenizerError, match=f"id {number} is outside the vocabulary"):
        tokenizer.detokenize([number])


def test_survives_pickling(tokenizer: GPT2BPETokenizer) -> None:
    """Preprocessing may send the tokenizer to worker processes."""
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.tokenize("hello 你好") == tokenizer.tokenize("hello 你好")


def test_merge_pairs_takes_the_lowest_rank_and_the_leftmost() -> None:
    ranks = {("a", "a"): 1, ("b", "c"): 0, ("aa", "a"): 2, ("aa", "bc"): 3}
    assert merge_pairs(list("aaabc"), ranks) == ["aaa", "bc"]
    assert merge_pairs(list("aabc"), ranks) == ["aabc"]
    assert merge_pairs([], ranks) == []
    assert merge_pairs(["x"], ranks) == ["x"]


def test_byte_alphabet_is_one_printable_character_a_byte() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert all(char.isprintable() and not char.isspace() for char in alphabet)
    assert (alphabet[ord("A")], alphabet[ord(" ")], alphabet[ord("\n")]) == ("A", "Ġ", "Ċ")


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_windows_line_ends_change_nothing(tmp_path: Path, gpt2_files: tuple[str, str]) -> None:
    merges = Path(gpt2_files[1]).read_text(encoding="utf-8").replace("\n", "\r\n")
    (tmp_path / "merges.txt").write_bytes(merges.encode())
    tokenizer = GPT2BPETokenizer(gpt2_files[0], str(tmp_path / "merges.txt"))
    assert tokenizer.tokenize("hello the") == GPT2BPETokenizer(*gpt2_files).tokenize("hello the")


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        ("{not json", "--vocab-file .* is not JSON"),
        ("[1, 2]", "--vocab-file .* must map each token to an id"),
        ('{"a": 0, "b": 2}', "ids 0, 1, 2, ... used once"),
        ('{"a": 0, "b": null}', "ids 0, 1, 2, ... used once"),
        ('{"a": 0, "b": 1}', "lacks .* symbols that single bytes or"),
    ],
)
def test_bad_vocab_files(
    tmp_path: Path, gpt2_files: tuple[str, str], vocab: str, message: str
) -> None:
    path = write(tmp_path, "vocab.json", vocab)
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer("GPT2BPETokenizer", vocab_file=path, merge_file=gpt2_files[1])


@pytest.mark.parametrize("line", ["a b c", "ab", "a  b", " a"])
def test_bad_merge_lines_are_named(tmp_path: Path, gpt2_files: tuple[str, str], line: str) -> None:
    path = write(tmp_path, "merges.txt", f"#version: 0.2\nh e\n{line}\n")
    with pytest.raises(TokenizerError, match=r"--merge-file .* line 3 is"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file=path)


def test_files_of_two_tokenizers_are_refused(tmp_path: Path, gpt2_files: tuple[str, str]) -> None:
    path = write(tmp_path, "merges.txt", "#version: 0.2\nq q\n")
    with pytest.raises(TokenizerError, match="the first is 'qq'"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file=path)


def test_a_vocabulary_without_an_end_token_says_so(
    tmp_path: Path, gpt2_files: tuple[str, str]
) -> None:
    vocab = json.loads(Path(gpt2_files[0]).read_text(encoding="utf-8"))
    del vocab["<|endoftext|>"]
    path = write(tmp_path, "vocab.json", json.dumps(vocab))
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=path, merge_file=gpt2_files[1])
    assert len(tokenizer.tokenize("<|endoftext|>")) > 1
    with pytest.raises(TokenizerError, match=r"has no eod token; .*--append-eod"):
        _ = tokenizer.eod
