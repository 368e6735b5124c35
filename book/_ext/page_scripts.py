"""Sphinx extension: every inline script at most once on a page.

sphinx-thebe registers its settings before the builder has collected its scripts, so they end up on each page
twice, and the second ``const`` is an error in the browser's console. The book does not use Thebe.
"""


def once(app, pagename, templatename, context, doctree):
    """Drop repeated inline scripts, and Thebe's, from the scripts of one page."""
    seen, kept = set(), []
    for script in context.get("script_files", []):
        body = getattr(script, "attributes", {}).get("body")
        if "thebe" in str(getattr(script, "filename", "") or "") or "THEBE_JS_URL" in (
            body or ""
        ):
            continue
        if body is None or body not in seen:
            kept.append(script)
            seen.add(body)
    context["script_files"] = kept


def setup(app):
    """Connect to Sphinx; late, so that every other extension has added its scripts."""
    app.connect("html-page-context", once, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
