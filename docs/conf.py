"""Sphinx settings."""

from splitstep import __version__

project = "Splitstep"
author = "The Splitstep authors"
copyright = "2026, the Splitstep authors"
release = __version__
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Splitstep {release}"
exclude_patterns = ["_build", "generated"]
