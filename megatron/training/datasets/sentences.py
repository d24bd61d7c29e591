"""Splitting text into sentences with nltk."""

from __future__ import annotations

from collections.abc import Callable

from .text_encoder import PreprocessError


def sentence_splitter(language: str, *, keep_newlines: bool) -> Callable[[str], list[str]]:
    """A function from a text to its sentences, without the white space between them unless
    `keep_newlines`. Raises PreprocessError if nltk or its model of the language is missing."""
    try:
        from nltk.tokenize import PunktTokenizer
    except ImportError:
        raise PreprocessError(
            "--split-sentences needs nltk 3.9 or later; install it with `pip install nltk`"
        ) from None
    try:
        punkt = PunktTokenizer(language)
    except LookupError:
        raise PreprocessError(
            f"nltk has no sentence model for --lang {language}; get the models with "
            "`python -m nltk.downloader punkt_tab`"
        ) from None

    def split(text: str) -> list[str]:
        spans = list(punkt.span_tokenize(text))
        if keep_newlines and spans:  # each sentence reaches up to the next
            starts = [0, *(start for start, _ in spans[1:])]
            spans = list(zip(starts, [*starts[1:], len(text)], strict=True))
        return [text[start:end] for start, end in spans]

    return split
