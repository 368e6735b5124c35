"""Frames of a figure: drawn off screen, the same bytes from run to run, small enough to store."""

import contextlib
import io
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

Picture: TypeAlias = Any  # PIL.Image.Image; Pillow is imported where it is needed

COLOURS = 96


def draw(plot: Callable[..., Any], values: Mapping[str, Any], dpi: int) -> Picture:
    """Call a plot and return its figure as a picture; every figure that it opened is closed.

    Args:
        plot: draws one figure; may return the figure or axes of it.
        values: arguments of the plot.
        dpi: resolution in dots per inch.

    Returns:
        An RGB picture on white.

    Raises:
        ValueError: the plot drew no figure, an empty one, or several without saying which.
        Exception: whatever the plot itself raises.
    """
    import matplotlib.pyplot as plt
    from PIL import Image

    before = set(plt.get_fignums())
    try:
        with _quiet():
            figure = _figure(
                plot(**values), [plt.figure(n) for n in plt.get_fignums() if n not in before], values
            )
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", bbox_inches=None)
    finally:
        for number in set(plt.get_fignums()) - before:
            plt.close(number)
    buffer.seek(0)
    return Image.open(buffer).convert("RGB")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Draw off screen: a plot that ends with ``plt.show()`` must not show and lose its figure."""
    import matplotlib.pyplot as plt

    show = plt.show
    plt.show = lambda *args, **kwargs: None
    try:
        with plt.ioff(), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        plt.show = show


def _figure(returned: Any, opened: list[Any], values: Mapping[str, Any]) -> Any:
    from matplotlib.figure import FigureBase

    given = getattr(returned, "figure", returned)
    if isinstance(given, FigureBase):
        figure = given
    elif len(opened) == 1:
        figure = opened[0]
    else:
        what = "no figure" if not opened else f"{len(opened)} figures"
        raise ValueError(
            f"plot({_arguments(values)}) drew {what}; expected one, or to return the one to show"
        )
    if not (figure.get_axes() or figure.texts or figure.images):
        raise ValueError(f"plot({_arguments(values)}) drew an empty figure")
    return figure


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _few_colours(picture: Picture, colours: int = COLOURS) -> Picture:
    """The picture with a palette: its commonest colours exactly, every other one rounded to the nearest.

    Half of the palette is what most pixels have (a median cut alone would shift the colour of a thin curve),
    half comes from a median cut, for heat maps and for the shades at the edges of text.
    """
    import numpy as np
    from PIL import Image
    from scipy.spatial import cKDTree

    pixels = np.asarray(picture).reshape(-1, 3)
    packed = pixels.astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
    found, where, counts = np.unique(packed, return_inverse=True, return_counts=True)
    common = found[np.lexsort((found, -counts))][: colours // 2]
    cut = picture.quantize(colours // 2, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    rest = np.array(cut.getpalette()).reshape(-1, 3)
    palette = np.unique(np.vstack([_unpacked(common), rest]), axis=0).astype(np.uint8)
    nearest = cKDTree(palette).query(_unpacked(found))[1]
    few = Image.fromarray(nearest[where].reshape(picture.height, picture.width).astype(np.uint8), mode="P")
    few.putpalette(palette.tobytes())
    return few


def _unpacked(packed: Any) -> Any:
    import numpy as np

    return np.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=-1)


def webp(picture: Picture) -> bytes:
    """Return the picture as lossless WebP with at most 96 colours.

    Args:
        picture: a Pillow image.

    Returns:
        The file's bytes, the same for the same picture.
    """
    buffer = io.BytesIO()
    _few_colours(picture).convert("RGB").save(buffer, "WEBP", lossless=True, quality=80, method=4)
    return buffer.getvalue()


def png(picture: Picture, colours: int = COLOURS) -> bytes:
    """Return the picture as a PNG with a palette of few colours, without metadata.

    Args:
        picture: a Pillow image.
        colours: how many at most, up to 256.

    Returns:
        The file's bytes, the same for the same picture.
    """
    buffer = io.BytesIO()
    _few_colours(picture, colours).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def with_footer(picture: Picture, text: str) -> Picture:
    """Return the picture with a line of text in a strip below it, broken over lines where it is long.

    Args:
        picture: a Pillow image.
        text: one sentence.

    Returns:
        A new, taller image.
    """
    from PIL import Image, ImageDraw

    font, height = _font(), 22
    columns = max(10, int((picture.width - 24) / font.getlength("n")))
    lines = textwrap.wrap(text, columns)
    strip = 14 + height * len(lines)
    tall = Image.new("RGB", (picture.width, picture.height + strip), "white")
    tall.paste(picture, (0, 0))
    pen = ImageDraw.Draw(tall)
    pen.line((12, picture.height + 4, picture.width - 12, picture.height + 4), fill="#CCCCCC")
    for k, line in enumerate(lines):
        pen.text((12, picture.height + 9 + height * k), line, font=font, fill="#555555")
    return tall


def _font() -> Any:
    from pathlib import Path

    import matplotlib
    from PIL import ImageFont

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(file), 15)
