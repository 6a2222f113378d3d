"""How Sphinx makes the site of these pages: ``python -m sphinx -n -W docs build/site``.

With ``-D plot_gallery=0`` no demo is run, and the gallery has the pictures of ``docs/_static/gallery``.
Nothing is fetched: the names of Python's own modules are in ``docs/_inventories``.
"""

import importlib.util
import inspect
import os
import re
import shutil
import sys
from pathlib import Path

from pygments.lexers.special import TextLexer

import synkro
from synkro import errors

DOCS = Path(__file__).parent
PICTURES = DOCS / "_static" / "gallery"
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "demos"))  # for what the demos of the cookbook share
os.environ.setdefault("MPLBACKEND", "Agg")

project, author, version = "Synkro", "Synkro developers", synkro.__version__
copyright = author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["gallery/*.ipynb", "gallery/*.py", "gallery/*.py.md5", "gallery/*.zip"]
templates_path = ["_templates"]
# functions below are no part of the cache; and the gallery's pictures need no references back
suppress_warnings = ["config.cache", "sphinx_gallery.config"]

# ── pages of Markdown ────────────────────────────────────────────────────────────────────────────────

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

OUTSIDE = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the repository that the site has under another name."""


def lead_inside(app, name, source):
    """Have links to pages outside of this folder lead to those of the site."""
    up = "../" * name.count("/")
    for outside, inside in OUTSIDE.items():
        source[0] = re.sub(rf"\]\((\.\./)*{re.escape(outside)}", f"]({up}{inside}", source[0])


# ── docstrings ───────────────────────────────────────────────────────────────────────────────────────

PARTS = {
    "Data": "data, shape, dtype, ndim, size, nbytes, alloc_size, set_value, set_length, set_shape, "
    "condition_data, free_memory",
    "StoredData": "path, shape, dtype, ndim, size, nbytes",
    "Function": "__call__, submit, options, check, as_serial, as_theano, build_inputs, placement, "
    "update_modes",
    "Shared": "value, shape, dtype, ndim, size, target, get_value, set_value, transfer",
    "Ring": "close",
    "RingWriter": "write, close",
}
"""What users need of classes that others of the package need more of."""

autosummary_generate = True
autosummary_context = {"parts": PARTS}
autodoc_typehints = "none"  # editors show them; in a signature of eighteen they hide its names
autodoc_member_order = "groupwise"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = napoleon_attr_annotations = False
intersphinx_mapping = {"python": ("https://docs.python.org/3", "_inventories/python.inv")}
nitpick_ignore_regex = [
    ("py:.*", r"(numpy|np|cupy|torch|jax|h5py|zarr|matplotlib|pytensor|joblib|collections|NDArray)\b.*"),
]

PUBLIC = set(synkro.__all__)
ERRORS = {name for name in synkro.__all__ if isinstance(getattr(errors, name, None), type)}
STANDARD = r"(?:concurrent\.futures|contextvars|functools|logging|threading)"


def link_names(app, what, name, obj, options, lines):
    """Link names of errors, and of public functions in double backquotes, to their pages."""
    if what == "class" and not is_made_here(obj):
        lines += ["", *(inspect.getdoc(obj.__init__) or "").splitlines()]
    if name.endswith(".as_theano"):
        lines[:] = ["Another name of ``as_serial``, which is that of the classic form."]
    text = "\n".join(lines)
    for known in PUBLIC:
        role = "class" if isinstance(getattr(synkro, known), type) else "func"
        text = re.sub(rf"``(?:synkro\.|synk\.)?{known}\(\)``", f":{role}:`~synkro.{known}`", text)
    for known in ERRORS:
        text = re.sub(rf"(?<![`\w.~]){known}(?![\w`])", f":exc:`~synkro.{known}`", text)
    text = re.sub(rf"``({STANDARD}\.[\w.]+)``", r":py:obj:`\1`", text)
    text = re.sub(r"^Raises:(?= \S)", "**Raises:**", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")


def is_made_here(thing):
    """Whether users get instances of a class, and make none: its arguments are not theirs."""
    return isinstance(thing, type) and (
        thing.__name__ in {*PARTS, "World"} or issubclass(thing, Exception)
    )


def hide_signature(app, what, name, obj, options, signature, returns):
    """Leave the arguments of such a class out."""
    return ("", None) if signature and is_made_here(obj) else None


# ── the gallery ──────────────────────────────────────────────────────────────────────────────────────


def close_session(gallery, name):
    """What sphinx-gallery does between two demos."""
    synkro.close()


def can_run(demo):
    """Whether what a demo imports is here."""
    imported = re.findall(r"^(?:import|from) (\w+)", demo.read_text(), re.MULTILINE)
    return all(importlib.util.find_spec(name) is not None for name in imported)


def number(demo):
    """The number of a demo, by its path."""
    return int(Path(demo).name.split("_")[1])


class Numbered:
    """Demos in the order of their numbers."""

    def __init__(self, folder):
        pass

    def __call__(self, name):
        return number(name)


def place_pictures(app):
    """Have pages of demos that are not run show the pictures that are kept."""
    images = DOCS / "gallery" / "images"
    images.mkdir(parents=True, exist_ok=True)
    for kept in PICTURES.glob("*.png"):
        shutil.copyfile(kept, images / f"sphx_glr_{kept.stem}_001.png")


PICTURE = """
.. image:: /gallery/images/sphx_glr_{}_001.png
   :alt: {}
   :class: sphx-glr-single-img
"""


def show_picture(app, name, source):
    """The picture of a demo that was not run stands before its text."""
    picture = PICTURES / f"{name.rpartition('/')[2]}.png"
    if name.startswith("gallery/demo_") and "sphx-glr-single-img" not in source[0] and picture.exists():
        title, underline, text = re.split(r"\n(=+)\n", source[0], maxsplit=1)
        source[0] = "\n".join(
            [title, underline, PICTURE.format(picture.stem, title.rpartition("\n")[2]), text]
        )


sphinx_gallery_conf = {
    "examples_dirs": "../demos",
    "gallery_dirs": "gallery",
    "filename_pattern": "|".join(
        re.escape(demo.name) for demo in ROOT.glob("demos/demo_*.py") if can_run(demo)
    ),
    "ignore_pattern": r"^(?!.*demo_)",
    "within_subsection_order": Numbered,
    "minigallery_sort_order": number,
    "reset_modules": (close_session,),
    "show_memory": False,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "remove_config_comments": True,
    "doc_module": (),
    "backreferences_dir": None,
}

# ── how it looks ─────────────────────────────────────────────────────────────────────────────────────

html_theme = "pydata_sphinx_theme"
html_title = "Synkro"
html_context = {"default_mode": "auto"}
html_static_path = ["_static"]
html_css_files = ["synkro.css"]
html_copy_source = html_show_sourcelink = False
html_show_copyright = html_show_sphinx = False
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}
html_sidebars = {"index": [], "changes": [], "benchmarks": [], "verified": []}


def setup(app):
    app.connect("builder-inited", place_pictures, priority=1)
    app.connect("source-read", show_picture)
    app.connect("source-read", lead_inside)
    app.connect("include-read", lambda app, path, name, source: lead_inside(app, name, source))
    app.add_lexer("mermaid", TextLexer)  # pictures on GitHub, which need a network
    app.connect("autodoc-process-signature", hide_signature)
    app.connect("autodoc-process-docstring", link_names, priority=400)  # before napoleon
