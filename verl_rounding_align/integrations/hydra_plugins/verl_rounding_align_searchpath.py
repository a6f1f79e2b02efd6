"""Hydra plugin: lets `+rounding_align=rope` find this package's overlays from any Hydra application.

Hydra looks for plugins in the namespace package `hydra_plugins` only, so the distribution installs this file there.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlRoundingAlignSearchPath(SearchPathPlugin):
    """Append the package's overlays to the search path, behind the application's own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-rounding-align", path="pkg://verl_rounding_align.integrations.conf")
