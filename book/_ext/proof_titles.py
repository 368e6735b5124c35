"""Sphinx extension: a folded proof has a title to click on, and no two proofs have the same id.

sphinx-proof makes a proof an admonition without a title, each with the id "proof". The script that folds
``:class: dropdown`` looks for the title, and stops, for the whole page, at the first one that it misses.
"""

from docutils import nodes


def add_titles(app, doctree):
    """Turn the words "Proof." that open a folded proof into its title."""
    for node in doctree.findall(nodes.admonition):
        if "proof" not in node.get("classes", []):
            continue
        node["ids"] = []
        titled = any(isinstance(child, nodes.title) for child in node.children)
        if "dropdown" in node["classes"] and not titled:
            text = next(node.findall(nodes.Text), None)
            if text is not None and text.startswith("Proof. "):
                text.parent.replace(text, nodes.Text(text.removeprefix("Proof. ")))
            node.insert(0, nodes.title("", "Proof"))


def setup(app):
    """Connect to Sphinx."""
    app.connect("doctree-read", add_titles)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
