"""Hydra plugin: lets `+rounding_align=rope` find this package's overlays from any Hydra application.

Hydra looks for plugins in the namespace package `hydra_plugins` only, so the distribution installs this file there. The
overlays are no files: there is one for each legal value of the key, made when it is asked for. Until then nothing heavy is
imported.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

PROVIDER = "verl-rounding-align"


class VerlRoundingAlignSearchPath(SearchPathPlugin):
    """Append the package's overlays to the search path, behind the application's own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider=PROVIDER, path=f"{VerlRoundingAlignOverlays.scheme()}://overlays")


class VerlRoundingAlignOverlays(ConfigSource):
    """The overlays, one Hydra group for each framework that has one."""

    @staticmethod
    def scheme() -> str:
        return "verl-rounding-align"

    def available(self) -> bool:
        return True

    def _groups(self) -> list[str]:
        from verl_rounding_align.integrations import FRAMEWORKS

        return [row.group for row in FRAMEWORKS.values() if row.group]

    def _find(self, config_path: str):
        """Return the overlay of `GROUP/VALUE`, None if there is none."""
        group, _, value = config_path.removesuffix(".yaml").rpartition("/")
        if group not in self._groups():
            return None
        from verl_rounding_align.integrations import overlays

        return overlays(group).get(value)

    def is_group(self, config_path: str) -> bool:
        return config_path in self._groups()

    def is_config(self, config_path: str) -> bool:
        return self._find(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        from omegaconf import OmegaConf

        found = self._find(config_path)
        if found is None:
            raise ConfigLoadError(f"{PROVIDER} has no overlay {config_path!r}")
        return ConfigResult(
            provider=self.provider,
            path=f"{self.scheme()}://{self.path}",
            config=OmegaConf.create(found),
            header={"package": "_global_"},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else sorted(self._groups())
        if config_path not in self._groups() or results_filter == ObjectType.GROUP:
            return []
        from verl_rounding_align.integrations import overlays

        return sorted(overlays(config_path))
