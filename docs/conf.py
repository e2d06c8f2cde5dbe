"""How the pages of this folder become a site: `make docs` writes it to build/docs/html.

Sphinx builds it, with MyST for the Markdown pages and furo for the looks, because Sphinx has a search of
its own, reads docstrings, and needs nothing from the network. No page loads anything from elsewhere.
Mathematics is no exception: KaTeX's scripts lie in the wheel of sphinxcontrib-katex, and write MathML, which
needs no fonts of KaTeX.
"""

import sys
from importlib import metadata
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_extensions"), str(DOCS.parent)]

project = "fastqt"
copyright = "the authors of fastqt"
version = release = metadata.version("fastqt")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.katex",
    "absent",
    "api",
    "notebooks",
    "repository",
    "tables",
]
exclude_patterns = ["_extensions", "_static", "pictures"]

# What the site has of Markdown files outside of this folder, to which pages link.
site_pages = {
    "README.md": "index.md",
}

# Pages whose blocks of Python are run, and which can be downloaded as notebooks.
notebook_pages = ("quick-start", "how-to/retriever", "how-to/search")

myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 4  # the anchors that GitHub gives to headings
myst_fence_as_directive = ["math"]

# Public names are documented under the names by which users import them.
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "name"
smartquotes_action = "D"  # quotation marks stay as in code

# Types of other libraries, and those of fastqt that are no public names, are shown without a link.
nitpicky = True
nitpick_ignore_regex = [("py:(class|obj|data|exc|func|meth)", r".*")]

toc_object_entries = False

html_theme = "furo"
html_title = f"fastqt {version}"
html_static_path = ["_static", "pictures/logo-light.svg", "pictures/logo-dark.svg"]
html_favicon = "pictures/logo-light.svg"
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "search_order.js")  # Sphinx opens it where it is started
html_show_sphinx = False
html_copy_source = False
html_use_index = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_logo": "logo-light.svg",
    "dark_logo": "logo-dark.svg",
}
highlight_language = "text"  # a block without a language is what a program printed
pygments_style = "friendly"
pygments_dark_style = "monokai"
katex_css_path = "katex-math.css"  # the extension's own: MathML needs no other
katex_options = 'output: "mathml", throwOnError: true'
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div:not(.output) > div.highlight pre"  # nobody copies what a block printed
