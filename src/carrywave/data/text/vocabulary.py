"""Learn a vocabulary from the training file: tokens by decreasing count, ties in the order of the tokens themselves.

Characters and words always have <unk>, for tokens that train does not have. What it is like is learned from tokens that are cut:
`data.vocabulary` and `data.min_count` say which; without them, half of those that occur once are, but no more than one in a hundred of all
tokens, so that little data stays as it is. Where the text itself has <unk>, the vocabulary is closed already, and nothing is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from carrywave.data.text.tokenizers import CODE_POINTS, END, UNKNOWN, code_points, split_words, tokenizers_library
from carrywave.errors import DataError, SpecError
from carrywave.spec.data_spec import DataSpec

BPE_SIZE = 8000
TOKENS_FOR_UNKNOWN = 100  # for each one that becomes <unk>
LINE_ENDS = (END, "\n")  # a text of one line has it once, and prompts begin with it
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


def choose(counts: Mapping[str, int], data: DataSpec, *, keep_rare: bool = False) -> tuple[str, ...]:
    """Choose the vocabulary: tokens by frequency, then alphabetically; <unk> comes last, unless the text has it.

    `keep_rare`: <unk> is learned in another way (`model.dropout_rare`).
    """
    if data.lowercase:
        lowered: Counter[str] = Counter()
        for word, count in counts.items():
            lowered[word.lower()] += count
        counts = lowered
    kept = sorted((token for token, count in counts.items() if count >= data.min_count), key=lambda token: (-counts[token], token))
    kept = kept[: data.vocabulary]
    if UNKNOWN not in counts and len(kept) == len(counts) and not keep_rare:
        once = [token for token in kept if counts[token] == 1 and token not in LINE_ENDS]
        cut = set(once[1::2][: sum(counts.values()) // TOKENS_FOR_UNKNOWN])  # every other one: not all from the end of the alphabet
        kept = [token for token in kept if token not in cut]
    return tuple(kept) if UNKNOWN in kept else (*kept, UNKNOWN)


def learn(kind: str, texts: Iterable[str], data: DataSpec, *, keep_rare: bool = False) -> tuple[tuple[str, ...], str | None, int]:
    """Learn (vocabulary, byte-pair tokenizer as JSON, size) from texts that are cut only where it does not change the tokens."""
    if data.lowercase and kind != "word":
        raise SpecError(f"data.lowercase is for words, but data.tokens={kind}; set data.tokens=word, or remove it")
    if kind == "char":
        vocabulary = choose(count_chars(texts), data, keep_rare=keep_rare)
        return vocabulary, None, len(vocabulary)
    if kind == "word":
        vocabulary = choose(count_words(split_words(text) for text in texts), data, keep_rare=keep_rare)
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
