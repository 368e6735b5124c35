"""The pages that the table of contents names."""


def named(node):
    """Every page below a node of ``_toc.yml``, without extension, in order."""
    if isinstance(node, dict):
        here = [node[key] for key in ("root", "file") if key in node]
        return here + [name for value in node.values() for name in named(value)]
    return [name for item in node for name in named(item)] if isinstance(node, list) else []
