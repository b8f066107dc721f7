"""Learn a vocabulary from the training file: tokens by decreasing count, ties in the order of the tokens themselves.

`data.vocabulary` and `data.min_count` limit it, and tokens that are cut become <unk>. Word vocabularies always contain <unk>.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from carrywave.data.text.tokenizers import CODE_POINTS, UNKNOWN, code_points, split_words, tokenizers_library
from carrywave.errors import DataError, SpecError
from carrywave.spec.data_spec import DataSpec

BPE_SIZE = 8000
GATHER_CHARS = 1 << 20  # short texts are counted together, because one pass over the table of all code points costs a millisecond


def count_chars(texts: Iterable[str]) -> dict[str, int]:
    """Count each character."""
    counts = np.zeros(CODE_POINTS, np.int64)
    for text in gather(texts):
        counts += np.bincount(code_points(text), minlength=CODE_POINTS)
    return {chr(point): int(counts[point]) for point in np.flatnonzero(counts)}


def count_words(word_lists: Iterable[Iterable[str]]) -> dict[str, int]:
    """Count each word."""
    counts: Counter[str] = Counter()
    for words in word_lists:
        counts.update(words)
    return counts


def gather(texts: Iterable[str]) -> Iterator[str]:
    """Yield the same text in pieces of about a million characters or more."""
    parts: list[str] = []
    held = 0
    for text in texts:
        parts.append(text)
        held += len(text)
        if held >= GATHER_CHARS:
            yield "".join(parts)
            parts, held = [], 0
    if parts:
        yield "".join(parts)


def choose(counts: Mapping[str, int], data: DataSpec, *, words: bool) -> tuple[str, ...]:
    """Choose the vocabulary: tokens by frequency, then alphabetically; <unk> comes last, for words or if the spec limits the vocabulary.

    Words always get <unk>, because no training text contains every word that another text may contain.
    """
    if words and data.lowercase:
        lowered: Counter[str] = Counter()
        for word, count in counts.items():
            lowered[word.lower()] += count
        counts = lowered
    kept = sorted((token for token, count in counts.items() if count >= data.min_count), key=lambda token: (-counts[token], token))
    limited = words or data.vocabulary is not None or data.min_count > 1
    kept = kept[: data.vocabulary]
    if limited and UNKNOWN not in kept:
        kept.append(UNKNOWN)
    return tuple(kept)


def learn(kind: str, texts: Iterable[str], data: DataSpec) -> tuple[tuple[str, ...], str | None, int]:
    """Learn (vocabulary, byte-pair tokenizer as JSON, size) from texts that are cut only where it does not change the tokens."""
    if data.lowercase and kind != "word":
        raise SpecError(f"data.lowercase is for words, but data.tokens={kind}; set data.tokens=word, or remove it")
    if kind == "char":
        vocabulary = choose(count_chars(texts), data, words=False)
        return vocabulary, None, len(vocabulary)
    if kind == "word":
        vocabulary = choose(count_words(split_words(text) for text in texts), data, words=True)
        return vocabulary, None, len(vocabulary)
    if kind == "byte":
        if data.vocabulary is not None or data.min_count > 1:
            raise SpecError("data.vocabulary and data.min_count do not apply to data.tokens=byte, which has 256 tokens; remove them")
        for _ in texts:  # consume them only for the validation done while reading
            pass
        return (), None, 256
    json_text, size = learn_bpe(texts, data)
    return (), json_text, size


def learn_bpe(texts: Iterable[str], data: DataSpec) -> tuple[str, int]:
    """Train a byte-level byte-pair tokenizer; return it as JSON, with its size."""
    library = tokenizers_library()
    size = data.vocabulary or BPE_SIZE
    if size < 256:
        raise SpecError(f"data.vocabulary={size} is too small for data.tokens=bpe, which starts from 256 bytes; use 256 or more")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=max(2, data.min_count),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    failures: list[DataError] = []

    def lines() -> Iterator[list[str]]:
        # The library swallows exceptions raised by its input iterator, so store them and re-raise afterwards.
        try:
            for text in texts:
                yield text.split("\n")
        except DataError as error:
            failures.append(error)

    tokenizer.train_from_iterator(lines(), trainer)
    if failures:
        raise failures[0]
    return str(tokenizer.to_str()), int(tokenizer.get_vocab_size())
