"""How the book's excerpts were chosen (the inputs of figure 2): from CPython's documentation, by fixed rules.

``book/data/excerpts.json`` is the result, stored because the documentation differs between Python versions;
``rc_lib.corpus`` reads it.  Nothing here runs when a chapter does.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path


def _prose_paragraphs(topic: str) -> list[str]:
    """Return the paragraphs of one topic that are English sentences: no code, grammar or lists."""
    found = []
    for paragraph in re.split(r"\n\s*\n", topic):
        line = re.sub(r"\s+", " ", paragraph).strip()
        plain = sum(c.isalpha() or c in " ,." for c in line)
        sentence = re.match(r"[A-Z].*[.]$", line) and "::=" not in line and ">>>" not in line
        if len(line) >= 120 and sentence and plain >= 0.93 * len(line):
            found.append(line)
    return found


def openings(
    topics: Mapping[str, str], n: int = 32, least: int = 1500, most: int = 2600
) -> list[dict[str, str]]:
    """Select the first ``n`` topics, by name, of more than ``least`` characters, and cut them at ``most``.

    Args:
        topics: topic name to text, as ``pydoc_data.topics.topics``.
        n: how many.
        least: a topic must be longer.
        most: characters kept.

    Returns:
        Rows ``{"topic", "text"}``.

    Raises:
        ValueError: fewer than ``n`` topics are long enough.
    """
    long = sorted(name for name, text in topics.items() if len(text) > least)
    if len(long) < n:
        raise ValueError(f"topics: only {len(long)} topics exceed {least} characters, but n={n}")
    return [{"topic": name, "text": topics[name][:most]} for name in long[:n]]


def prose(topics: Mapping[str, str], n: int = 32, least: int = 700, most: int = 2600) -> list[dict[str, str]]:
    """Select the ``n`` topics with most prose: sentences only, no paragraph twice.

    Topics quote each other, so the shorter ones are read first and a paragraph counts where it is seen first.

    Args:
        topics: topic name to text, as ``pydoc_data.topics.topics``.
        n: how many.
        least: fewest characters of prose for a topic to count.
        most: characters at which an excerpt ends, at the end of the paragraph before.

    Returns:
        Rows ``{"topic", "text"}``, by name.

    Raises:
        ValueError: fewer than ``n`` topics have enough prose.
    """
    found = {name: text for name, text in _new_prose(topics, most).items() if len(text) >= least}
    if len(found) < n:
        raise ValueError(f"topics: only {len(found)} topics have {least} characters of prose, but n={n}")
    best = sorted(sorted(found, key=lambda name: (-len(found[name]), name))[:n])
    return [{"topic": name, "text": found[name]} for name in best]


def _new_prose(topics: Mapping[str, str], most: int) -> dict[str, str]:
    seen: set[str] = set()
    found = {}
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        new = [p for p in dict.fromkeys(_prose_paragraphs(topics[name])) if p not in seen]
        seen.update(new)
        while new and sum(map(len, new)) > most:
            new.pop()
        found[name] = "\n\n".join(new)
    return found


def write(target: Path) -> None:
    """Write the excerpts of the running Python's documentation, as ``book/data/excerpts.json`` was.

    Args:
        target: the JSON file to write.
    """
    from pydoc_data.topics import topics

    version = ".".join(map(str, sys.version_info[:3]))
    content = {
        "about": f"pydoc_data.topics of CPython {version}, selected by rc_lib.excerpts.write",
        "license": "PSF-2.0, Copyright (c) Python Software Foundation; full text in excerpts-LICENSE.txt",
        "python": version,
        "opening": openings(topics),
        "prose": prose(topics),
    }
    target.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
