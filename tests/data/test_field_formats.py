"""Texts with labels as published files write them; each test names a file that is written so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carrywave.data.formats.field_formats import Asked, conll, conllu, fasttext, label_first, paired, trees
from carrywave.data.prepare import Prepared, prepare, read_python
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

ASKED = Asked()
TREEBANK = """# sent_id = 1
# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\tv\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\tp\t_\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\ts\t_\t5\tcase\t_\t_
4\tel\tel\tDET\td\t_\t5\tdet\t_\t_
5\tmar\tmar\tNOUN\tn\t_\t1\tobl\t_\t_
5.1\tya\tya\tADV\tr\t_\t_\t_\t1:advmod\t_

# sent_id = 2
1\tSí\tsí\t_\ti\t_\t0\troot\t_\t_
"""


def asked(folder: Path, task: str, file: str, **data: Any) -> Spec:
    return Spec.model_validate({"task": task, "data": {"train": str(folder / file), "cache": str(folder / "cache"), "share": 0, **data}})


def prepared(folder: Path, task: str, file: str, content: str, **data: Any) -> Prepared:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(content)
    return prepare(asked(folder, task, file, **data))


def test_conllu_has_syntactic_words_and_upos() -> None:
    """Universal Dependencies: multiword tokens and empty nodes are no words."""
    read = conllu(TREEBANK, ASKED)
    assert read is not None
    assert read.rows == [
        {"tokens": ["vamos", "nos", "a", "el", "mar"], "labels": ["VERB", "PRON", "ADP", "DET", "NOUN"]},
        {"tokens": ["Sí"], "labels": [None]},
    ]


def test_conllu_has_other_columns_by_name(tmp_path: Path) -> None:
    found = prepared(tmp_path, "tagging", "es-ud-train.conllu", TREEBANK, label="deprel")
    assert found.codec.labels == ("case", "det", "obj", "obl", "root")
    with pytest.raises(DataError, match=r"data.label=pos is not a column of CoNLL-U; use one of form, lemma, upos"):
        conllu(TREEBANK, Asked("pos"))


@pytest.mark.parametrize(
    ("content", "label", "expected"),
    [  # WNUT 2017; CoNLL 2003; GermEval 2014; GermEval's outer spans
        ("Hi\tO\n#Ann\tB-person\n\t\nno\tO\n", None, [(["Hi", "#Ann"], ["O", "B-person"]), (["no"], ["O"])]),
        (
            "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nPeter NNP B-NP B-PER\n",
            None,
            [(["EU", "rejects"], ["B-ORG", "O"]), (["Peter"], ["B-PER"])],
        ),
        (
            '#\thttp://x.de\t[2010]\n1\t"\tO\tO\n2\tJesu\tB-PER\tO\n\n#\thttp://y.de\t[2011]\n1\t#\tO\tO\n',
            None,
            [(['"', "Jesu"], ["O", "O"]), (["#"], ["O"])],
        ),
        (
            "#\thttp://x.de\t[2010]\n1\tJesu\tB-PER\tO\n2\tging\tO\tO\n\n1\tJa\tO\tO\n",
            "2",
            [(["Jesu", "ging"], ["B-PER", "O"]), (["Ja"], ["O"])],
        ),
    ],
)
def test_words_in_columns(content: str, label: str | None, expected: list[Any]) -> None:
    read = conll(content, Asked(label))
    assert read is not None
    assert [(row["tokens"], row["labels"]) for row in read.rows] == expected


def test_iob1_begins_its_spans() -> None:
    """The original files of CoNLL 2003, in which B- is only between spans of one type."""
    read = conll("EU I-ORG\nBonn B-ORG\nsays O\n\nAnn I-PER\nLee I-PER\n", ASKED)
    assert read is not None
    assert [row["labels"] for row in read.rows] == [["B-ORG", "B-ORG", "O"], ["B-PER", "I-PER"]]
    assert "I- begins 2 spans" in read.how


@pytest.mark.parametrize(
    ("reader", "content", "expected"),
    [  # TREC; rt-polarity; fastText's cooking questions; the Stanford Sentiment Treebank
        (
            label_first,
            "DESC:manner How did it ?\nENTY:animal What cat ?\n" * 4,
            [("DESC:manner", "How did it ?"), ("ENTY:animal", "What cat ?")],
        ),
        (label_first, "0 silly , tedious .\n1 a joy\n" * 4, [("0", "silly , tedious ."), ("1", "a joy")]),
        (fasttext, "__label__sauce __label__cheese how much ?\n__label__oven why\n", [("sauce", "how much ?"), ("oven", "why")]),
        (trees, "(3 (2 It) (4 (2 's) (4 good)))\n(1 (2 no) (0 way))\n", [("3", "It 's good"), ("1", "no way")]),
    ],
)
def test_a_label_before_each_text(reader: Any, content: str, expected: list[tuple[str, str]]) -> None:
    read = reader(content, ASKED)
    assert [(row["label"], row["text"]) for row in read.rows[: len(expected)]] == expected


def test_a_text_is_not_taken_for_labels(tmp_path: Path) -> None:
    text = "".join(f"{number} is what this line begins with\n" for number in range(10))
    with pytest.raises(DataError, match=r"novel\.txt is text, and no labels are found in it or in a file beside it; use a \.jsonl"):
        prepared(tmp_path, "classification", "novel.txt", text)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("train_text.txt", "train_labels.txt"),
        ("seq.in", "seq.out"),
        ("atis.valid.in", "atis.valid.out"),
        ("a-sentences.txt", "a-labels.txt"),
    ],
)
def test_labels_in_a_file_beside_the_text(tmp_path: Path, text: str, labels: str) -> None:
    """As tweeteval and the slots of ATIS and SNIPS are kept."""
    tagging = "in" in text.split(".")
    (tmp_path / labels).write_text("O B-city\nO O\n" if tagging else "1\n0\n")
    found = prepared(
        tmp_path, "tagging" if tagging else "classification", text, "to Rome\nplay it 😀\n" if not tagging else "to Rome\nplay it\n"
    )
    assert found.codec.labels == (("B-city", "O") if tagging else ("0", "1"))
    assert any(f"labels are read from {labels}, line by line" in note for note in found.notes)
    (tmp_path / labels).write_text("O B-town\nO O\n" if tagging else "1\n2\n")
    changed = prepare(asked(tmp_path, "tagging" if tagging else "classification", text))
    assert changed.codec.labels != found.codec.labels  # not what the cache has of the text
    assert paired("a\nb\n", "1\n", tagging=False) is None


def test_later_files_are_read_by_the_labels_of_train(tmp_path: Path) -> None:
    """Lines to predict for may have a label before them, as those of train, or none."""
    found = prepared(tmp_path, "classification", "TREC.train", "LOC where ?\nNUM how many ?\n" * 4)
    spec = asked(tmp_path, "classification", "TREC.train")
    for content in ("NUM how many ?\n", "how many ?\n"):
        (tmp_path / "more.txt").write_text(content)
        again = read_python(str(tmp_path / "more.txt"), found.codec, spec, labelled=False)
        assert found.codec.decode(again.inputs) == "how many ?"


@pytest.mark.parametrize(
    ("columns", "rows", "text", "label"),
    [  # SMS spam on Kaggle; AG news; IMDB; SST-2 of GLUE; sentiment140; tweets about airlines; lyrics about candidates
        ("v1,v2,,,", ["ham,Ok lar {n} joking,,,", "spam,Free entry {n} now,,,"], "Ok lar 0 joking", "ham"),
        ("Category,Message", ["ham,Ok lar {n} joking", "spam,Free entry {n} now"], "Ok lar 0 joking", "ham"),
        (
            None,
            [
                "3,Fears {n},Unions representing workers say that they are rather disappointed {n}",
                "4,A race {n},A second team has set its date {n}",
            ],
            "Unions representing workers say that they are rather disappointed 0",
            "3",
        ),
        ("id,sentiment,review", ["{n}_8,1,With all this stuff {n}", "{n}_9,0,The classic war {n}"], "With all this stuff 0", "1"),
        ("sentence,label", ["hide new {n} secretions,0", "that loves {n} its characters,1"], "hide new 0 secretions", "0"),
        (
            None,
            ["0,14{n},NO_QUERY,ann{n},That is a bummer {n} I say", "4,15{n},NO_QUERY,bob{n},What a day {n} it was for us"],
            "That is a bummer 0 I say",
            "0",
        ),
        (
            "tweet_id,airline_sentiment,airline_sentiment_confidence,airline,retweet_count,text",
            ["57{n},neutral,1.0,Delta,0,@delta what she said {n}", "58{n},positive,0.75,United,1,@united you have added an airport {n}"],
            "@delta what she said 0",
            "neutral",
        ),
        (
            "id,candidate,sentiment,line,url",
            [
                "{n},Ann Lee,negative,what are we to her {n},http://lyrics.example/a-song-{n}",
                "{n}1,Bo Ray,neutral,looking for Bo {n},http://lyrics.example/b-song-{n}",
            ],
            "what are we to her 0",
            "negative",
        ),
    ],
)
def test_tables_with_other_names_or_none(tmp_path: Path, columns: str | None, rows: list[str], text: str, label: str) -> None:
    lines = [row.format(n=number) for number in range(5) for row in rows]
    found = prepared(tmp_path, "classification", "t.csv", "\n".join([*([] if columns is None else [columns]), *lines]) + "\n")
    assert len(found.codec.labels) == 2
    assert found.train.labels is not None
    assert found.codec.labels[int(found.train.labels[0])] == label
    assert found.codec.decode(found.train.inputs[: found.train.lengths[0]]) == text
    assert any(" as text and " in note or "ignored: " in note for note in found.notes)


def test_what_is_not_clear_is_asked(tmp_path: Path) -> None:
    """Pairs of questions have two texts; cars have several columns that may be labels."""
    pairs = "question1,question2,is_duplicate\n" + "how do I do it,how can I do this,0\nwhat is that,why is it so,1\n" * 3
    with pytest.raises(DataError, match=r"which column has the text is not clear \(question2, question1\); set data.text to its name"):
        prepared(tmp_path, "classification", "q.csv", pairs)
    cars = "name,origin,cylinders\n" + "chevrolet chevelle malibu,usa,8\ntoyota corona mark ii,japan,4\n" * 3
    with pytest.raises(DataError, match=r"which column has the label is not clear \(origin, cylinders\); set data.label to its name"):
        prepared(tmp_path, "classification", "c.csv", cars)
    assert prepared(tmp_path, "classification", "c.csv", cars, label="origin").codec.labels == ("japan", "usa")


def test_fields_of_json_lines_with_other_names(tmp_path: Path) -> None:
    """SST-2 as a dataset of Hugging Face's hub: sentence and label, beside an index."""
    rows = [
        {"sentence": text, "label": label, "idx": number} for number, (text, label) in enumerate([("good film", 1), ("bad film", 0)] * 3)
    ]
    content = "\n".join(map(json.dumps, rows))
    found = prepared(tmp_path, "classification", "t.jsonl", content)
    assert (found.codec.text_column, found.codec.labels) == ("sentence", ("0", "1"))
    tagged = "\n".join(json.dumps({"id": "1", "tokens": ["a", "b"], "ner_tags": [0, n % 3]}) for n in range(6))
    assert prepared(tmp_path, "tagging", "n.jsonl", tagged).codec.labels == ("0", "1", "2")
