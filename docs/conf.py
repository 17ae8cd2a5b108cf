# SPDX-License-Identifier: Apache-2.0
"""The site: ``make docs`` builds it from the repository's Markdown and from the docstrings of the installed package.

The source folder is the repository itself. So a relative link means the same to Sphinx as to a reader of the file.
``make docs`` turns warnings into errors: a link, an anchor or a cross-reference that leads nowhere ends the build.
"""

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.errors import ExtensionError

from cpu_attn import _adapters

sys.path.insert(0, str(Path(__file__).parent))
import tables

# The adapters' docstrings are read without the libraries that the adapters need.
autodoc_mock_imports = ["torch", "transformers", "vllm", "sglang", "mpi4py", "ray"]
_adapters.require = lambda name: None

project = html_title = "cpu-attn"
release = metadata.version("cpu-attn")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
copybutton_prompt_text = r">>> |\.\.\. "  # an example is copied as it is typed
copybutton_prompt_is_regexp = True
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "examples/*.md", "native/**.md"]
exclude_patterns = [".*", "build", "dist", "native/kernel/MEASUREMENTS.md"]
nitpicky = True

myst_heading_anchors = 4
autodoc_typehints = "none"  # most are Any: the docstrings say shapes and dtypes
autodoc_member_order = "bysource"
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"
smartquotes_action = "D"  # dashes alone: a docstring's "" is Python's

html_baseurl = tables.SITE
html_theme = "furo"
html_theme_options = {"light_css_variables": {"code-font-size": "78%"}}
html_static_path = html_css_files = ["site.css"]
html_copy_source = html_show_copyright = False


def link_pages(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes links of the pages that a docstring names by their files."""
    lines[:] = [re.sub(r"\bdocs/([\w/]+)\.md\b", r":doc:`/docs/\1`", line) for line in lines]


def refuse_stale_tables(app: Any) -> None:
    if pages := tables.stale():
        raise ExtensionError(f"{', '.join(map(str, pages))}: python docs/tables.py writes the tables anew")


def find_elsewhere(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Links a name of Python that a docstring says without its module, where one module alone has it."""
    if node.get("refdomain") != "py":
        return None
    domain, name = env.get_domain("py"), f".{node['reftarget']}"
    kinds = domain.objtypes_for_role(node["reftype"]) or ()
    there = ((full, x) for full, x in domain.objects.items() if full.endswith(name) and not x.aliased)
    found = [full for full, x in there if x.objtype in kinds]
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], found[0], node, contnode)


def setup(app: Any) -> None:
    app.connect("builder-inited", refuse_stale_tables)
    app.connect("missing-reference", find_elsewhere)
    app.connect("autodoc-process-docstring", link_pages)
