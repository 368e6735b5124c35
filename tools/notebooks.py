"""The book's notebooks: the one place that knows where they are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"


def notebooks() -> list[Path]:
    """Return every notebook of the book, in a fixed order."""
    return sorted(p for p in BOOK.rglob("*.ipynb") if not {"_build", ".ipynb_checkpoints"} & set(p.parts))
