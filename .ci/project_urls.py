"""The links that the package index shows, written when the package is built.

A workflow of GitHub has the name of its repository in the environment. Elsewhere no repository is
known, and the paper alone is linked.
"""

import os
from collections.abc import Mapping
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def project_urls(environment: Mapping[str, str]) -> dict[str, str]:
    """Names and addresses, for ``[project.urls]``."""
    urls = {"Paper": "https://arxiv.org/abs/2602.21545"}
    server, repository = (environment.get(f"GITHUB_{x}") for x in ("SERVER_URL", "REPOSITORY"))
    if server and repository:
        source = f"{server}/{repository}"
        urls |= {
            "Source": source,
            "Issues": f"{source}/issues",
            "Documentation": f"{source}/tree/main/docs",
            "Changelog": f"{source}/blob/main/CHANGELOG.md",
        }
    return urls


class ProjectUrls(MetadataHookInterface):
    """Hatchling calls it for the fields of ``dynamic``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the links."""
        metadata["urls"] = project_urls(os.environ)
