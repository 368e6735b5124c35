import itertools
import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import corpus, models
from rc_lib.tasks import Examples, memorization
from rc_lib.tasks.memorization import ceiling, make, sentences

TEXT = "One fish was here. Two fish swim there! Do three fish swim? Four fish do not."


def examples(rows, labels, padding=0):
    """Examples from lists of different lengths; padding is marked by ``real`` alone."""
    n = max(map(len, rows))
    inputs = torch.tensor([row + [padding] * (n - len(row)) for row in rows])
    real = torch.tensor([[i < len(row) for i in range(n)] for row in rows])
    return Examples(inputs, torch.tensor([row + [1] * (n - len(row)) for row in labels]), real)


# ---------------------------------------------------------------------------------------------------
# The ceiling


def test_ceiling_of_tokens_that_repeat():
    # 7 7 7 with labels 0 1 1: two of three; 5 alone is right
    assert ceiling(examples([[7, 7, 7, 5]], [[0, 1, 1, 0]])) == 3 / 4
    # the same token in another set is another question
    assert ceiling(examples([[7, 5], [7, 6]], [[0, 0], [1, 1]])) == 1.0


def test_ceiling_pools_sets_that_hold_the_same_tokens_equally_often():
    assert ceiling(examples([[1, 2, 2], [2, 1, 2]], [[0, 0, 1], [1, 1, 1]])) == (1 + 3) / 6
    # once and twice are not equally often
    assert ceiling(examples([[1, 2], [2, 1, 2]], [[0, 0], [1, 1, 1]])) == 1.0


def test_ceiling_leaves_padding_out():
    assert ceiling(examples([[3, 3], [3]], [[0, 0], [1]], padding=3)) == 1.0


def test_ceiling_names_what_it_cannot_count(plain_types):
    with pytest.raises(ValueError, match="examples has no real token"):
        ceiling(examples([[1, 2]], [[0, 0]]).take([]))
    with pytest.raises(TypeError, match="examples must be Examples, but is NoneType"):
        ceiling(None)


def test_ceiling_reads_coordinates_too():
    points = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [2.0, 1.0]]])
    real = torch.ones(1, 3, dtype=torch.bool)
    assert ceiling(Examples(points, torch.tensor([[0, 1, 1]]), real)) == 2 / 3


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=3), max_size=4)
)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_ceiling_is_the_best_of_all_functions_of_token_and_multiset(sets):
    if not sets:
        return
    rows, labels = [[t for t, _ in one] for one in sets], [[y for _, y in one] for one in sets]
    # Every equivariant function is an answer for each (token, how often each token occurs): try all of them.
    questions = [(token, tuple(Counter(row)[k] for k in range(3))) for row in rows for token in row]
    wanted = [y for one in labels for y in one]
    different = sorted(set(questions))
    best = max(
        sum(answer[different.index(q)] == y for q, y in zip(questions, wanted, strict=True))
        for answer in itertools.product((0, 1), repeat=len(different))
    )
    assert ceiling(examples(rows, labels)) == best / len(wanted)


# ---------------------------------------------------------------------------------------------------
# The task on the book's text


def test_the_papers_sizes_are_the_default():
    task = make()
    assert len(task.train) == 500
    assert task.test is task.train
    assert task.train.inputs.shape[1] == 128
    assert (task.classes, task.features, task.positions, task.chance) == (2, None, False, 0.5)
    assert task.symbols == len(task.words) == len(set(task.words)) == int(task.train.inputs.max()) + 1
    assert set(task.train.inputs.unique().tolist()) == set(range(task.symbols))  # no symbol is idle
    assert 0.5 < task.majority < 0.52
    # A third of the tokens occur again in their pair; of two fair coins the majority is right for 3/4.
    assert 0.8 < task.ceiling < 0.95
    assert task.ceiling == ceiling(task.test)


def test_a_pair_is_two_sentences_and_a_separator_padded():
    task = make(pairs=5, tokenizer="words")
    found = sentences("\n\n".join(corpus.texts("prose")))
    words = [[task.words[i] for i in row] for row in task.train.inputs.tolist()]
    for row, real, (a, b) in zip(
        words, task.train.real, [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)], strict=True
    ):
        n = int(real.sum())
        assert real.tolist() == [True] * n + [False] * (len(row) - n)
        assert set(row[n:]) <= {"[PAD]"}
        split = row.index("[SEP]")
        assert "".join(row[:split]) == found[a].lower().replace(" ", "")
        assert "".join(row[split + 1 : n]) == found[b].lower().replace(" ", "")


def test_word_pieces_are_the_tokenizers_own():
    task = make(pairs=1)
    found = sentences("\n\n".join(corpus.texts("prose")))
    tok = corpus.tokenizer("minilm")
    ids = [tok.token_to_id(task.words[i]) for i in task.train.inputs[0].tolist()]
    # what the tokenizer makes of the pair itself, without [CLS] and the last [SEP]
    assert ids == tok.encode(found[0], found[1]).ids[1:-1]


def test_long_pairs_are_cut():
    task = make(pairs=30, max_tokens=11)
    assert task.train.inputs.shape == (30, 11)
    assert torch.equal(task.train.inputs[0], torch.arange(1, 12)) or task.train.real[0].all()
    whole = make(pairs=30)
    first = [whole.words[i] for i in whole.train.inputs[3, :11].tolist()]
    assert [task.words[i] for i in task.train.inputs[3].tolist()] == first
    assert make(pairs=30, max_tokens=1).train.real.all()


def test_labels_are_fair_coins_of_the_seed_on_real_tokens():
    a, b, c = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(a.train.labels, b.train.labels)
    assert torch.equal(a.train.inputs, c.train.inputs)
    assert not torch.equal(a.train.labels, c.train.labels)
    assert a.train.labels[~a.train.real].sum() == 0
    real = a.train.labels[a.train.real].double()
    assert abs(real.mean().item() - 0.5) < 4 * 0.5 / len(real) ** 0.5
    # equal tokens of one pair are tossed apart, or nothing would limit a network
    assert a.ceiling < 1


def test_the_global_random_state_is_neither_read_nor_moved():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    a = make(seed=1, pairs=3, text=TEXT)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(make(seed=1, pairs=3, text=TEXT).train.labels, a.train.labels)


# ---------------------------------------------------------------------------------------------------
# Sentences and pairs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT, ["One fish was here.", "Two fish swim there!", "Do three fish swim?", "Four fish do not."]),
        ("A b c,\nd e.\n\nF g h", ["A b c, d e.", "F g h"]),
        ("See e.g. Section five. It is short.", ["See e.g. Section five.", "It is short."]),
        ("Ask Mr. J. Smith about it. He knows that.", ["Ask Mr. J. Smith about it.", "He knows that."]),
        ('He said "go on now." She did so.', ['He said "go on now."', "She did so."]),
        ("It costs 3.5 units here. and goes on.", ["It costs 3.5 units here. and goes on."]),
        ("Too short. This one is not.", ["This one is not."]),
        ("The same words. The same words.", ["The same words."]),
        ("", []),
    ],
)
def test_sentences(text, expected):
    assert sentences(text) == expected


def test_the_books_prose_splits_into_whole_sentences():
    found = sentences("\n\n".join(corpus.texts("prose")))
    assert len(found) > 500
    assert all(one[-1] in ".:!?)\"'”’" for one in found)
    assert not any(one[0].islower() for one in found)


@given(st.integers(2, 14), st.data())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_neighbours_come_first_and_every_pair_comes_once(n, data):
    total = n * (n - 1) // 2
    pairs = memorization._neighbours(n, total)
    assert sorted(pairs) == list(itertools.combinations(range(n), 2))
    assert [j - i for i, j in pairs] == sorted(j - i for i, j in pairs)
    count = data.draw(st.integers(1, total))
    assert memorization._neighbours(n, count) == pairs[:count]
    without_overlap = [i for pair in pairs[: n // 2] for i in pair]
    assert len(set(without_overlap)) == len(without_overlap)


# ---------------------------------------------------------------------------------------------------
# One's own text


@pytest.mark.parametrize("tokenizer", ["minilm", "words"])
def test_a_file_and_a_string_of_the_same_text_agree(tmp_path, tokenizer):
    file = tmp_path / "mine.txt"
    file.write_text("\ufeff" + TEXT, encoding="utf-8")  # with the mark that some editors put first
    a = make(pairs=6, text=file, tokenizer=tokenizer)
    b = make(pairs=6, text=TEXT, tokenizer=tokenizer)
    assert torch.equal(a.train.inputs, b.train.inputs)
    assert a.words == b.words
    assert a.words[0] == "[PAD]"
    assert [a.words[i] for i in a.train.inputs[0].tolist() if i] == (
        ["one", "fish", "was", "here", ".", "[SEP]", "two", "fish", "swim", "there", "!"]
    )


def test_a_text_may_contain_the_special_words(tmp_path):
    task = make(pairs=1, text="Here is [PAD] for you. And [SEP] is there too.")
    assert task.words[0] == "[PAD]"
    assert task.train.real.all()  # a written [PAD] is a token as any other
    assert (task.train.inputs > 0).all()


@pytest.mark.usefixtures("plain_types")
def test_bad_files_are_named(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("Café au lait here.".encode("latin-1"))
    (tmp_path / "short.txt").write_text(TEXT)
    for path, error, message in [
        (tmp_path / "none.txt", FileNotFoundError, "there is no file .*none.txt"),
        (tmp_path, IsADirectoryError, "is a folder"),
        (tmp_path / "empty.txt", ValueError, "empty.txt is empty"),
        (tmp_path / "latin.txt", ValueError, "latin.txt is not UTF-8: byte 3"),
        (tmp_path / "short.txt", ValueError, "4 different sentences.*6 pairs.*pairs=7$"),
        (str(tmp_path / "short.txt"), ValueError, "a file must be a Path"),
        (b"bytes", TypeError, "text must be a string or a Path"),
        ("", ValueError, "text is empty"),
    ]:
        with pytest.raises(error, match=message):
            make(pairs=7, text=path)


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"pairs": 0}, ValueError, "pairs"),
        ({"pairs": 10**6}, ValueError, "fewer than pairs=1000000"),
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"source": "web"}, ValueError, "source must be one of 'corpus', 'rte'"),
        ({"tokenizer": "bert"}, ValueError, "tokenizer must be one of"),
        ({"source": "rte", "text": TEXT}, ValueError, "exclude each other"),
        ({"seed": None}, TypeError, "seed"),
    ],
)
def test_bad_settings_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)


def test_without_the_vocabularys_package_words_are_offered(monkeypatch):
    def missing(name):
        raise corpus.MissingPackage("the package is not installed")

    monkeypatch.setattr(corpus, "tokenizer", missing)
    with pytest.raises(corpus.MissingPackage, match="not installed; tokenizer='words' needs no package"):
        make(pairs=2, text=TEXT)
    assert len(make(pairs=2, text=TEXT, tokenizer="words").train) == 2


# ---------------------------------------------------------------------------------------------------
# RTE, without a network: the hub is played


def play_hub(monkeypatch, lines, tmp_path, cached=False, reachable=True, failure=None):
    """Let the hub hold a file of these lines; return the list of calls made to it."""
    import huggingface_hub

    file, calls = tmp_path / "train.jsonl", []
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def download(name, file_name, repo_type, local_files_only=False):
        calls.append((name, file_name, repo_type, local_files_only))
        if local_files_only and not cached:
            raise FileNotFoundError("not in the cache")
        if failure is not None:
            raise failure
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(models, "hub_reachable", lambda: reachable)
    return calls


def rte_lines(n):
    # U+2028 ends a line for str.splitlines, but not in JSON
    rows = [{"text1": f"Premise {i}\u2028 here.", "text2": f"Claim {i}.", "label": 0} for i in range(n)]
    return [json.dumps(row, ensure_ascii=False) for row in rows]


def test_rte_takes_the_first_pairs_in_order(monkeypatch, tmp_path):
    calls = play_hub(monkeypatch, rte_lines(5), tmp_path)
    task = make(pairs=3, source="rte", tokenizer="words")
    assert calls == [
        ("SetFit/rte", "train.jsonl", "dataset", True),
        ("SetFit/rte", "train.jsonl", "dataset", False),
    ]
    rows = [" ".join(task.words[i] for i in row if i) for row in task.train.inputs.tolist()]
    assert rows == [f"premise {i} here . [SEP] claim {i} ." for i in range(3)]


def test_rte_from_the_cache_asks_no_network(monkeypatch, tmp_path):
    calls = play_hub(monkeypatch, rte_lines(2), tmp_path, cached=True, reachable=False)
    assert len(make(pairs=2, source="rte", tokenizer="words").train) == 2
    assert len(calls) == 1


def test_rte_says_what_is_wrong(monkeypatch, tmp_path):
    play_hub(monkeypatch, rte_lines(2), tmp_path, reachable=False)
    with pytest.raises(models.ModelUnavailable, match="hub cannot be reached; source='corpus' needs no"):
        make(pairs=2, source="rte")
    play_hub(monkeypatch, rte_lines(2), tmp_path, failure=RuntimeError("it broke\nand more"))
    with pytest.raises(models.ModelUnavailable, match="could not be loaded: it broke; source"):
        make(pairs=2, source="rte")
    play_hub(monkeypatch, rte_lines(2), tmp_path)
    with pytest.raises(ValueError, match="has 2 pairs, fewer than pairs=3"):
        make(pairs=3, source="rte")
    for lines in (["no json"], ['{"sentence1": "a"}'], ["[1]"]):
        play_hub(monkeypatch, lines, tmp_path)
        with pytest.raises(ValueError, match="does not hold pairs text1, text2"):
            make(pairs=1, source="rte")
