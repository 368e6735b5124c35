"""Memorization: learn a random label for every token of 500 pairs of sentences (paper, section 4).

The paper reads pairs of the RTE data, cuts them to 128 tokens, gives every token a label 0 or 1 at random
and tells the network no positions.  There is nothing to generalise to: ``test`` is ``train``.

**Text.**  A pair is ``A [SEP] B``; ``[SEP]`` gets a label as every token does.  Without a network, A and B
are sentences of the book's own prose (``rc_lib.corpus``): first all neighbours that do not share a sentence,
then the other neighbours, then sentences two apart in the same way, and so on, until there are enough.  Your
own text is used alike; ``source="rte"`` takes the first pairs of RTE's training set from the hub.

**Ceiling.**  A network that treats its tokens alike gives equal tokens of one pair equal answers, and two
pairs that hold the same tokens equally often the same answers.  So at best it answers every token of such a
group with the group's most frequent label, and the function that does so is such a network's.  (Softmax
attention sees shares only: it cannot tell apart two pairs with the same tokens in the same proportions
either.  In the book's text there are none.)
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from rc_lib import checks, corpus, models
from rc_lib.tasks import Examples, Task, majority, require
from rc_lib.weights import generator

SOURCES = ("corpus", "rte")
TOKENIZERS = ("minilm", "words")
RTE = ("SetFit/rte", "train.jsonl")
_SEPARATOR = "[SEP]"
_PADDING = "[PAD]"

# The end of a sentence: a stop, perhaps closing marks, a space; what comes next decides (see ``sentences``).
_STOP = re.compile(r"[.!?…][\"'”’)\]]*\s+")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|etc|Mr|Mrs|Ms|Dr|Prof|St|No|Fig|Sec)|\b[A-Z])\.\s+$")
_FEWEST_WORDS = 3


def make(
    seed: int = 0,
    pairs: int = 500,
    max_tokens: int = 128,
    text: str | Path | None = None,
    source: str = "corpus",
    tokenizer: str = "minilm",
) -> Task:
    """Make the task.

    Args:
        seed: 0 or more; the labels depend on it, the text does not.
        pairs: Number of pairs.
        max_tokens: Longer pairs are cut to this many tokens, the separator included.
        text: Your own text: a ``Path`` to a UTF-8 file, or a string that is the text itself.
        source: ``"corpus"`` (the book's prose) or ``"rte"`` (needs a network once), if ``text`` is not given.
        tokenizer: ``"minilm"`` (WordPieces, from an installed package) or ``"words"`` (words and marks in
            small letters, from nothing).

    Returns:
        The ``Task``; sets are padded to the longest pair, symbol 0 is padding, and the other symbols are the
        tokens that occur, in order of first appearance; ``task.words`` names them.

    Raises:
        ValueError: a number below 1, an unknown name, ``text`` and ``source="rte"`` both, or a text that is
            empty, not UTF-8 or too short for so many pairs.
        TypeError: an argument of another type.
        FileNotFoundError: no file at ``text``.
        OSError: ``text`` cannot be read.
        rc_lib.models.ModelUnavailable: RTE is not on this machine and the hub cannot be reached.
        rc_lib.corpus.MissingPackage: the tokenizer's package is not installed.
    """
    checks.positive_int("pairs", pairs)
    checks.positive_int("max_tokens", max_tokens)
    checks.one_of("source", source, SOURCES)
    checks.one_of("tokenizer", tokenizer, TOKENIZERS)
    labels_from = generator(seed, "memorization.labels")
    rows = _rows(_pairs(pairs, text, source), max_tokens, tokenizer)
    examples, words = _examples(rows, labels_from)
    return Task(
        "memorization",
        examples,
        examples,
        classes=2,
        symbols=len(words),
        features=None,
        positions=False,
        chance=0.5,
        majority=majority(examples, examples),
        ceiling=ceiling(examples),
        words=words,
    )


def ceiling(examples: Examples) -> float:
    """The best accuracy of any network that treats tokens alike and sets as sets (ours; see the module).

    Args:
        examples: Sets of symbols, or of points; padding is left out.

    Returns:
        The largest share of real tokens with the right label.

    Raises:
        TypeError: they are no ``Examples``.
        ValueError: there is no set, and so no real token.
    """
    require("examples", examples)
    groups: dict[tuple, Counter] = defaultdict(Counter)
    for tokens, labels, real in zip(
        examples.inputs.tolist(), examples.labels.tolist(), examples.real.tolist(), strict=True
    ):
        kept = [
            (tuple(t) if isinstance(t, list) else t, y)
            for t, y, r in zip(tokens, labels, real, strict=True)
            if r
        ]
        multiset = tuple(sorted(t for t, _ in kept))
        for token, label in kept:
            groups[multiset, token][label] += 1
    return sum(max(group.values()) for group in groups.values()) / int(examples.real.sum())


def sentences(text: str) -> list[str]:
    """Split a text into its sentences, each once, in order of first appearance.

    A sentence ends at an empty line, or after ``.``, ``!``, ``?`` or ``…`` and a space unless a small letter
    follows or the stop belongs to an initial or a common abbreviation.  Pieces of fewer than three words are
    left out.

    Args:
        text: English prose; line breaks within a paragraph count as spaces.

    Returns:
        The sentences, with single spaces.
    """
    found: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        for piece in _split(" ".join(paragraph.split())):
            if len(re.findall(r"\w+", piece)) >= _FEWEST_WORDS:
                found[piece] = None
    return list(found)


def _split(paragraph: str) -> Iterator[str]:
    start = 0
    for stop in _STOP.finditer(paragraph):
        following = re.search(r"\w", paragraph[stop.end() :])
        continues = following is not None and following.group().islower()
        if not continues and not _ABBREVIATION.search(paragraph[start : stop.end()]):
            yield paragraph[start : stop.end()].strip()
            start = stop.end()
    yield paragraph[start:].strip()


def _pairs(count: int, text: str | Path | None, source: str) -> list[tuple[str, str]]:
    if text is not None and source == "rte":
        raise ValueError("text and source='rte' exclude each other: give one")
    if source == "rte":
        return _rte(count)
    found = sentences("\n\n".join(corpus.texts("prose")) if text is None else _read(text))
    possible = len(found) * (len(found) - 1) // 2
    if possible < count:
        hint = "; a string is the text itself, a file must be a Path" if isinstance(text, str) else ""
        raise ValueError(
            f"text has {len(found)} different sentences, which make {possible} pairs, "
            f"fewer than pairs={count}{hint}"
        )
    return [(found[i], found[j]) for i, j in _neighbours(len(found), count)]


def _neighbours(sentences: int, count: int) -> list[tuple[int, int]]:
    """The first ``count`` pairs i < j: one apart, then two, …; at each distance first without overlap."""
    chosen: list[tuple[int, int]] = []
    for gap in range(1, sentences):
        starts = range(sentences - gap)
        # Blocks of length gap take turns: a start in an even block ends in an odd one.
        for block in (0, 1):
            chosen += [(i, i + gap) for i in starts if i // gap % 2 == block]
        if len(chosen) >= count:
            break
    return chosen[:count]


def _read(text: str | Path) -> str:
    if isinstance(text, str):
        content, name = text, "text"
    elif isinstance(text, Path):
        content, name = _read_file(text), f"text: the file {text}"
    else:
        raise TypeError(f"text must be a string or a Path, but is {checks.describe(text)}")
    if not content.strip():
        raise ValueError(f"{name} is empty")
    return content


def _read_file(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"text: there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"text: {path} is a folder; a text file is needed")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: the file {path} is not UTF-8: byte {error.start} fits nothing") from error


def _rte(count: int) -> list[tuple[str, str]]:
    """The first pairs of RTE's training set, whose labels are not used."""
    name, file = RTE
    lines = _download(name, file).read_text("utf-8").split("\n")
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
        found = [(row["text1"], row["text2"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"source='rte': {file} of {name} does not hold pairs text1, text2") from error
    if len(found) < count:
        raise ValueError(f"source='rte' has {len(found)} pairs, fewer than pairs={count}")
    return found[:count]


def _download(name: str, file: str) -> Path:
    """A file of a data set on the hub, from the local cache if it is there."""
    from huggingface_hub import hf_hub_download

    def fetch(**options: bool) -> Path:
        with models.quiet():
            return Path(hf_hub_download(name, file, repo_type="dataset", **options))

    try:
        return fetch(local_files_only=True)
    except (OSError, ValueError):
        pass
    reason = "the hub cannot be reached"
    if models.hub_reachable():
        try:
            return fetch()
        except Exception as error:  # the transport's own, as in models.hub_reachable
            reason = str(error).strip().split("\n")[0]
    raise models.ModelUnavailable(
        f"source='rte': {name} is not on this machine and could not be loaded: {reason}; "
        "source='corpus' needs no network"
    )


def _rows(pairs: list[tuple[str, str]], max_tokens: int, tokenizer: str) -> list[list[str]]:
    split = _word_pieces() if tokenizer == "minilm" else _words
    return [[*split(a), _SEPARATOR, *split(b)][:max_tokens] for a, b in pairs]


def _word_pieces() -> Callable[[str], list[str]]:
    try:
        tok = corpus.tokenizer("minilm")
    except corpus.MissingPackage as error:
        raise corpus.MissingPackage(f"{error}; tokenizer='words' needs no package") from error
    return lambda sentence: tok.encode(sentence, add_special_tokens=False).tokens


def _words(sentence: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", sentence.lower())


def _examples(rows: list[list[str]], source: torch.Generator) -> tuple[Examples, tuple[str, ...]]:
    """Number the tokens by first appearance, pad with 0, draw a label for every real token."""
    numbers: dict[str, int] = {}
    ids = [[1 + numbers.setdefault(word, len(numbers)) for word in row] for row in rows]
    inputs = pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
    real = inputs != 0
    labels = torch.zeros_like(inputs)
    labels[real] = torch.randint(2, (int(real.sum()),), generator=source)
    return Examples(inputs, labels, real), (_PADDING, *numbers)
