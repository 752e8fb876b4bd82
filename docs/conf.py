"""Settings of Sphinx: ``python -m sphinx -W -n docs docs/_build/html`` builds the site, offline."""

import hashlib
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
# For the extensions, and for the notebooks' kernels, which are processes of their own.
sys.path[:0] = [str(ROOT / "docs" / "ext"), str(ROOT)]
import optax_muonplus  # noqa: E402

os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # for the pages on meshes
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

project = "optax_muonplus"
author = "The optax_muonplus authors"
copyright = "2026, the optax_muonplus authors"  # the name that Sphinx gives it
release = version = optax_muonplus.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_llms_txt",
    "mathml",
    "written_types",
]
exclude_patterns = ["_build", "ext", "jupyter_execute", "**.ipynb_checkpoints"]
source_suffix = {".md": "myst-nb"}

# Pages are executed, each in a fresh kernel; an error in one stops the build. What a page printed
# is kept until its code changes, or any code that it may import.
_imported = ("optax_muonplus/**/*.py", "examples/*.py", "lab/paper/*.py")
_files = sorted(path for pattern in _imported for path in ROOT.glob(pattern))
_code = hashlib.sha256(b"".join(path.read_bytes() for path in _files)).hexdigest()[:16]
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / ".cache" / "notebooks" / _code)
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds of a cell; a busy machine takes ten times the usual
nb_merge_streams = True
nb_execution_show_tb = True
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_update_mathjax = False
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_typehints = "description"  # the text is from docs/ext/written_types.py
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
doctest_global_setup = "import jax, jax.numpy as jnp, optax, optax_muonplus as omp"

# Names of other packages, whose inventories would have to be fetched from their hosts.
nitpick_ignore_regex = [
    ("py:.*", r"(jax|jnp|optax|numpy|np|flax|chex|equinox)\..*"),
    ("py:.*", r"(collections|typing|types)\..*"),
    # Types of fields, as their annotations say, of rooms that are not for users.
    ("py:class", r"ArrayTree|optax_muonplus\.(_|(method|frame|trees|run|extras)\.).*"),
    ("py:class", r"(optional|callable|array_like|function|mapping|sequence)"),
]

html_favicon = "_static/icon.svg"
html_theme = "furo"
pygments_style, pygments_dark_style = "friendly", "github-dark"  # none underlines modules
html_title = f"optax_muonplus {release}"
html_theme_options = {
    "light_logo": "logo.svg",
    "dark_logo": "logo-dark.svg",
    "sidebar_hide_name": True,
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = True  # llms.txt leads to the sources
html_show_sourcelink = False
