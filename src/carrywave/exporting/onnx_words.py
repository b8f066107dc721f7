"""The scores of words in a CRF as ONNX nodes: `WordScores` step by step, in the same whole numbers.

Shapes: T time, B lane, L characters of a word, A of them at its end, F features, V labels.
"""

from __future__ import annotations

from carrywave.data.text.spelling import EDGE
from carrywave.exporting.onnx_layers import Lanes
from carrywave.exporting.onnx_nodes import Nodes
from carrywave.model.heads import word_scores
from carrywave.model.heads.word_scores import AFFIX, PRIME, WordScores


def scores(nodes: Nodes, words: WordScores, characters_TBL: str, lanes: Lanes) -> str:
    """[T, B, V], from the characters of each word."""
    assert lanes.real_TB1 is not None  # a CRF takes lengths
    length, edge = len(words.powers), nodes.constant(EDGE)
    powers_L = nodes.weight("word_scores.powers", words.powers)
    codes_TBL = nodes.add("Where", lanes.real_TB1, characters_TBL, edge)
    small_TBL, kind_TBL = (
        nodes.add("Gather", nodes.weight(f"word_scores.{name}", table), codes_TBL)
        for name, table in (("small", words.small), ("kind", words.kind))
    )

    def below(x: str, most: int = PRIME) -> str:
        return nodes.add("Mod", x, nodes.constant(most))

    def hashed(x: str, powers: str, ends: int | None = None) -> str:
        x, powers = (x, powers) if ends is None else (nodes.slice(x, 2, 0, ends), nodes.slice(powers, 0, 0, ends))
        return below(nodes.add("ReduceSum", nodes.add("Mul", x, powers), nodes.constant([2]), keepdims=0))

    def times(x: str, factor: int) -> str:
        return nodes.add("Mul", x, nodes.constant(factor))

    def pair(one: str, other: str) -> str:
        return below(nodes.add("Add", times(one, word_scores.FACTOR), times(other, word_scores.BASE)))

    def later(x: str, by: int) -> str:
        padded = nodes.add("Pad", x, nodes.constant([max(-by, 0), 0, max(by, 0), 0]), edge)
        return nodes.slice(padded, 0, 0, by) if by < 0 else nodes.slice(padded, 0, by)

    def at_least_0(x: str) -> str:
        return nodes.add("Max", x, nodes.constant(0))

    def number(flags: str) -> str:
        return nodes.add("Cast", flags, to=nodes.onnx.TensorProto.INT64)

    def there(x: str) -> str:
        return nodes.add("Not", nodes.add("Equal", x, edge))

    affix = min(AFFIX, length)
    count_TB1 = nodes.add("ReduceSum", number(there(codes_TBL)), nodes.constant([2]), keepdims=1)
    places_TBA = nodes.add("Sub", count_TB1, nodes.constant(range(1, 1 + affix)))
    ends_TBA = nodes.add("GatherElements", small_TBL, at_least_0(places_TBA), axis=2)
    ends_TBA = nodes.add("Where", nodes.add("Less", places_TBA, nodes.constant(0)), edge, ends_TBA)
    before = [nodes.slice(nodes.add("Pad", kind_TBL, nodes.constant([0, 0, back, 0, 0, 0]), edge), 2, 0, length) for back in (1, 2)]
    third = nodes.add("And", *(nodes.add("Equal", kind_TBL, each) for each in before))
    counts_TBL = nodes.add("And", there(kind_TBL), nodes.add("Not", third))
    order_TBL = nodes.add("Sub", nodes.add("CumSum", number(counts_TBL), nodes.constant(2)), nodes.constant(1))
    at_places = nodes.add("Gather", powers_L, at_least_0(order_TBL))
    shape = hashed(nodes.add("Where", counts_TBL, kind_TBL, edge), at_places)
    word = hashed(small_TBL, powers_L)
    beginnings, endings = ([hashed(x, powers_L, 1 + more) for more in range(affix)] for x in (small_TBL, ends_TBA))
    features = [word, hashed(codes_TBL, powers_L), shape, *beginnings, *endings]
    features += [later(each, by) for each in (word, shape) for by in (-2, -1, 1, 2)]
    features += [later(endings[min(2, affix - 1)], by) for by in (-1, 1)]
    features += [pair(later(word, -1), word), pair(word, later(word, 1)), pair(pair(later(shape, -1), shape), later(shape, 1))]
    mixed = [
        below(nodes.add("Add", times(each, factor), nodes.constant(added)))
        for each, (factor, added) in zip(features, map(word_scores.mixing, range(len(features))), strict=True)
    ]
    rows = (nodes.add("Unsqueeze", below(each, len(words.table)), nodes.constant([2])) for each in mixed)
    found_TBFV = nodes.add("Gather", nodes.weight("word_scores.table", words.table), nodes.add("Concat", *rows, axis=2))
    return nodes.add("ReduceSum", found_TBFV, nodes.constant([2]), keepdims=0)
