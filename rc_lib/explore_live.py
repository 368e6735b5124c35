"""The controls of ``explore`` in a live kernel: core ipywidgets, the figure drawn anew at once."""

import base64
import html
import traceback
from collections.abc import Mapping
from typing import Any

from rc_lib import frames

_DPI = 100
_CARD = "max-width:100%;height:auto;background:white;border-radius:4px"
_ERROR = "white-space:pre-wrap;background:#fff3f0;color:#7a1f00;padding:0.6em;border-left:0.3em solid #D55E00"


def show(grid: Any) -> None:
    """Display the controls and the figure; raise what the plot raises at its default values.

    Args:
        grid: the plot and its controls, as ``explore`` makes it.

    Raises:
        Exception: whatever the plot itself raises.
    """
    from IPython.display import display
    from ipywidgets import HTML, VBox

    place = tuple(axis.start for axis in grid.axes)
    picture = grid.frame(place, _DPI)
    figure = HTML(_picture(grid, place))
    box = VBox([*_connected(grid, figure), figure])
    bundle = dict(box._repr_mimebundle_())
    # Where the saved notebook is read without a kernel, this picture stands in for the controls.
    footer = frames.with_footer(picture, grid.moves)
    bundle["image/png"] = base64.b64encode(frames.png(footer)).decode("ascii")
    bundle["text/plain"] = grid.moves
    display(bundle, raw=True)


def _connected(grid: Any, figure: Any) -> list[Any]:
    controls = [_control(axis) for axis in grid.axes]

    def redraw(_change: Mapping[str, Any]) -> None:
        place = tuple(int(control.value) for control in controls)
        try:
            figure.value = _picture(grid, place)
        except Exception:
            figure.value = _failure(grid, place)

    for control in controls:
        control.observe(redraw, names="value")
    return controls


def _control(axis: Any) -> Any:
    """A widget whose value is the place of the chosen value among the control's values."""
    from ipywidgets import Checkbox, Dropdown, Layout, SelectionSlider

    wide = {"style": {"description_width": "initial"}, "layout": Layout(width="min(100%, 32em)")}
    if axis.kind == "checkbox":
        return Checkbox(value=bool(axis.start), description=axis.label, indent=False)
    options = [(text, i) for i, text in enumerate(axis.texts)]
    widget = SelectionSlider if axis.kind == "range" else Dropdown
    return widget(options=options, value=axis.start, description=axis.label, **wide)


def _picture(grid: Any, place: tuple[int, ...]) -> str:
    picture = grid.frame(place, _DPI)
    source = base64.b64encode(frames.png(picture)).decode("ascii")
    alt = html.escape(grid.description(place), quote=True)
    size = f'width="{picture.width}" height="{picture.height}"'
    return f'<img src="data:image/png;base64,{source}" alt="{alt}" {size} style="{_CARD}">'


def _failure(grid: Any, place: tuple[int, ...]) -> str:
    """The plot's error, where the figure was: an empty box would hide it."""
    text = f"The plot failed at {grid.setting(place)}.\n\n{traceback.format_exc()}"
    return f'<pre role="alert" style="{_ERROR}">{html.escape(text)}</pre>'
