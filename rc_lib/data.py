"""Where the files that travel with the book are: the ledger, stored results, digitised curves."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_ROOTS = (_PACKAGE.parent / "book", _PACKAGE / "_book")


def path(name: str) -> Path:
    """Return the path of a file of the book, in a checkout or in an installed package.

    Args:
        name: path relative to the folder ``book/``, with forward slashes, e.g. ``"claims.yml"``.

    Returns:
        The existing file or folder.

    Raises:
        FileNotFoundError: neither the checkout nor the package has it.
    """
    for root in _ROOTS:
        candidate = root / name
        # A folder named book/ beside an installed package need not be ours: the ledger tells.
        if (root / "claims.yml").is_file() and candidate.exists():
            return candidate
    looked = " and ".join(str(root) for root in _ROOTS)
    raise FileNotFoundError(f"name={name!r}: no such file of the book; looked below {looked}")
