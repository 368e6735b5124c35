"""The stored controls of ``explore`` on the book's page: plain HTML, one small script, no other host.

Sphinx (through myst-nb) calls ``ExploreRenderer`` for every output that holds frames; ``page`` makes HTML.
Without JavaScript and in print the page shows the default frame and the line that says what moves.
"""

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

MIME = "application/vnd.rc-lib.explore+json"
_HERE = Path(__file__).resolve().parent


class ExploreRenderer:
    """Turns stored frames into a figure with native controls; found by myst-nb through an entry point."""

    mime_priority_overrides: ClassVar[list[tuple[str, str, int | None]]] = [
        (builder, MIME, 0) for builder in ("html", "dirhtml", "singlehtml")
    ]

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[Any] | None:
        """Return the nodes for stored frames, or None for any other kind of output.

        Args:
            renderer: myst-nb's renderer of the notebook.
            data: one representation of an output.
            inline: whether it stands within a line of text.

        Returns:
            A raw HTML node, or None.
        """
        if inline or data.mime_type != MIME:
            return None
        from docutils import nodes

        content = dict(data.content)
        content["id"] = f"{content['id']}-{data.cell_index}-{data.output_index}"
        renderer.add_js_file("rc_lib_explore", None, {"body": script()})
        return [nodes.raw(text=page(content), format="html", classes=["output", "rc-explore-output"])]


def script() -> str:
    """Return the script that a page with controls needs once; it brings its style sheet along."""
    css = json.dumps((_HERE / "explore.css").read_text(encoding="utf-8")).replace("</", "<\\/")
    add = f'document.head.appendChild(Object.assign(document.createElement("style"),{{textContent:{css}}}));'
    return add + "\n" + (_HERE / "explore.js").read_text(encoding="utf-8")


def page(content: Mapping[str, Any]) -> str:
    """Return the HTML of one figure with its controls.

    Args:
        content: what ``explore`` stored, with an ``id`` that is unique on its page.

    Returns:
        A ``div`` that is complete but for the script of ``script``.
    """
    at = content["default"]
    source = f"data:{content['mime']};base64,{content['frames'][content['grid'][at]]}"
    size = f'width="{content["width"]}" height="{content["height"]}"'
    style = f"max-width:min(100%,{content['width']}px);height:auto;background:#fff"
    rows = "\n".join(_row(f"{content['id']}-{i}", control) for i, control in enumerate(content["controls"]))
    kept = ("controls", "frames", "mime", "grid", "alts", "default")
    data = json.dumps({key: content[key] for key in kept}, ensure_ascii=False).replace("</", "<\\/")
    return f"""<div class="rc-explore" role="group" aria-label="Figure with controls" id="{content["id"]}">
<img class="rc-explore-picture" src="{source}" alt="{_escape(content["alts"][at])}" {size} style="{style}">
<div class="rc-explore-controls" hidden>
{rows}
</div>
<p class="rc-explore-moves">{_escape(content["moves"])}</p>
<p class="rc-explore-spoken" aria-live="polite"></p>
<script type="application/json">{data}</script>
</div>"""


def _row(id: str, control: Mapping[str, Any]) -> str:
    texts, start, kind = control["texts"], control["start"], control["kind"]
    if kind == "range":
        field = (
            f'<input type="range" id="{id}" min="0" max="{len(texts) - 1}" step="1" value="{start}"'
            f' aria-valuetext="{_escape(texts[start])}" autocomplete="off">'
        )
    elif kind == "checkbox":
        field = f'<input type="checkbox" id="{id}"{" checked" if start else ""} autocomplete="off">'
    else:
        options = (
            f'<option value="{i}"{" selected" if i == start else ""}>{_escape(text)}</option>'
            for i, text in enumerate(texts)
        )
        field = f'<select id="{id}" autocomplete="off">{"".join(options)}</select>'
    shown = "" if kind == "select" else _escape(texts[start])
    return (
        f'<label for="{id}">{_escape(control["label"])}</label>{field}'
        f'<output for="{id}" aria-live="off">{shown}</output>'
    )


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
