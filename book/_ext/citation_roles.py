"""Sphinx extension: entries of the bibliography are items of its list.

docutils writes role="doc-biblioentry", which DPUB-ARIA 1.1 has withdrawn: an item of a list says as much.
"""


def current_role(app, pagename, templatename, context, doctree):
    """Write the role that replaced the withdrawn one."""
    if "body" in context:
        context["body"] = context["body"].replace(
            'role="doc-biblioentry"', 'role="listitem"'
        )


def setup(app):
    """Connect to Sphinx."""
    app.connect("html-page-context", current_role)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
