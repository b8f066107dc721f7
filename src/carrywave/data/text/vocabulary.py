"""Learn a vocabulary from the training file: tokens by decreasing count, ties in the order of the tokens themselves.

Characters and words always have <unk>, for tokens that train does not have. What it is like is learned from tokens that are cut:
`data.vocabulary` and `data.min_count` say which; without them, half of those that occur once are, but no more than one in a hundred of all
tokens, so that little data stays as it is. Where the text itself has <unk>, the vocabulary is closed already, and nothing is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from carrywave.data.text.tokenizers import CODE_POINTS, END, UNKNOWN, code_points, split_words, tokenizers_library
from carrywave.errors import SpecError
from carrywave.spec.data_spec import DataSpec

BPE_SIZE = 8000
TOKENS_FOR_UNKNOWN = 100  # for each one that becomes <unk>
LINE_ENDS = (END, "\n")  # a text of one line has it once, and prompts begin with it


def count_chars(texts: Iterable[str]) -> dict[str, int]:
    """Count each character."""
    counts = np.zeros(CODE_POINTS, np.int64)
    for text in texts:
        found = np.bincount(code_points(text))
        counts[: len(found)] += found
    return {chr(point): int(counts[point]) for point in np.flatnonzero(counts)}


def count_words(word_lists: Iterable[Iterable[str]]) -> dict[str, int]:
    """Count each word."""
    return Counter(chain.from_iterable(word_lists))


def choose(counts: Mapping[str, int], data: DataSpec, *, keep_rare: bool = False) -> tuple[str, ...]:
    """Choose the vocabulary: tokens by frequency, then alphabetically; <unk> comes last, unless the text has it.

    `keep_rare`: <unk> is learned in another way (`model.dropout_rare`).
    """
    if data.lowercase:
        counts, written = Counter[str](), counts
        for word, count in written.items():
            counts[word.lower()] += count
    kept = sorted((token for token, count in counts.items() if count >= data.min_count), key=lambda token: (-counts[token], token))
    kept = kept[: data.vocabulary]
    if UNKNOWN not in counts and len(kept) == len(counts) and not keep_rare:
        once = [token for token in kept if counts[token] == 1 and token not in LINE_ENDS]
        cut = set(once[1::2][: sum(counts.values()) // TOKENS_FOR_UNKNOWN])  # every other one: not all from the end of the alphabet
        kept = [token for token in kept if token not in cut]
    return tuple(kept) if UNKNOWN in kept else (*kept, UNKNOWN)


def check_keys(kind: str, data: DataSpec, characters: int = 0) -> None:
    """Refuse keys about words, or about a vocabulary, that say nothing about tokens of a kind."""
    words, chosen = kind == "word", kind in ("word", "char", "bpe", "numbers")  # whoever passes numbers is told of these keys elsewhere
    applies = {
        "data.lowercase": words or not data.lowercase,
        "data.vocabulary": chosen or data.vocabulary is None,
        "data.min_count": chosen or data.min_count == 1,
        f"model.characters={characters}": words or not characters,
    }
    if key := next((key for key, fits in applies.items() if not fits), None):
        raise SpecError(f"{key} does not apply to {kind} tokens; set data.tokens=word for text, or remove it")


def learn(kind: str, texts: Iterable[str], data: DataSpec, *, keep_rare: bool = False) -> tuple[tuple[str, ...], str | None, int]:
    """Learn (vocabulary, byte-pair tokenizer as JSON, size) from texts that are cut only where it does not change the tokens."""
    if kind == "bpe":
        return (), *learn_bpe(texts, data)
    if kind == "byte":
        for _ in texts:  # consume them only for the validation done while reading
            pass
        return (), None, 256
    counts = count_chars(texts) if kind == "char" else count_words(map(split_words, texts))
    vocabulary = choose(counts, data, keep_rare=keep_rare)
    return vocabulary, None, len(vocabulary)


def learn_bpe(texts: Iterable[str], data: DataSpec) -> tuple[str, int]:
    """Train a byte-level byte-pair tokenizer; return it as JSON, with its size."""
    library = tokenizers_library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=data.vocabulary or BPE_SIZE,
        min_frequency=max(2, data.min_count),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.split("\n") for text in texts), trainer)
    return str(tokenizer.to_str()), int(tokenizer.get_vocab_size())
