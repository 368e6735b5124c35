"""How the excerpts were chosen: the stored file is what the rules give."""

import json
import sys

import pytest

from rc_lib import data, excerpts

STORED = json.loads(data.path("data/excerpts.json").read_text("utf-8"))


def test_the_stored_file_is_what_this_python_would_write(tmp_path):
    if ".".join(map(str, sys.version_info[:3])) != STORED["python"]:
        pytest.skip(f"the excerpts come from the documentation of CPython {STORED['python']}, not this one's")
    excerpts.write(tmp_path / "excerpts.json")
    assert json.loads((tmp_path / "excerpts.json").read_text("utf-8")) == STORED


TOPICS = {
    "b": "x" * 20,
    "a": "y" * 20,
    "c": "z" * 5,
    "long": "One sentence that is long enough to count as prose in every way, for it goes on and on until "
    "nobody remembers how it began at all.\n\n   code ::= nothing\n\nShort.\n\n"
    "A second sentence, indented\n   and broken over two lines, which says nothing and says it at a length "
    "that is sufficient for the rule.",
    "longer": "One sentence that is long enough to count as prose in every way, for it goes on and on until "
    "nobody remembers how it began at all.\n\n" + "* item\n" * 60,
}


def test_openings_are_cut_and_sorted():
    rows = excerpts.openings(TOPICS, n=2, least=10, most=7)
    assert rows == [{"topic": "a", "text": "y" * 7}, {"topic": "b", "text": "x" * 7}]
    with pytest.raises(ValueError, match="only 2 topics exceed 100 characters, but n=3"):
        excerpts.openings(TOPICS, n=3, least=100)


def test_prose_keeps_sentences_and_says_nothing_twice():
    (row,) = excerpts.prose(TOPICS, n=1, least=100)
    assert row["topic"] == "long"
    first, second = row["text"].split("\n\n")
    assert first.startswith("One sentence")
    assert second.startswith("A second sentence, indented and broken over")
    with pytest.raises(ValueError, match="only 1 topics have 100 characters of prose, but n=2"):
        excerpts.prose(TOPICS, n=2, least=100)
