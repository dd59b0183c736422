"""How Sphinx builds the site: ``python -m sphinx -W -b html docs docs/_build``."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from fsdpcore.core.version import VERSION  # noqa: E402

project = "fsdpcore"
version = release = VERSION
author = copyright = "the authors of fsdpcore"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "fsdpcore_site",
]
exclude_patterns = ["_build", "_ext"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["deflist", "attrs_block", "attrs_inline"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_display_short_literal_types = True
python_maximum_signature_line_length = 88
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
# In a string of a docstring ``x`` is code, and so is what has single backticks by mistake.
default_role = "code"
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"fsdpcore {VERSION}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db7f5", "color-brand-content": "#7db7f5"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True
