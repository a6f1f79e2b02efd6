"""Reading the files that users give: whatever is wrong with one is a single sentence that names the option and the file."""

from __future__ import annotations

import json
from pathlib import Path


def read_yaml(path: str | Path, option: str):
    """Return the OmegaConf mapping that a YAML file holds; interpolations in it are not resolved.

    Args:
        path: the file.
        option: what the user gave it as, for the message: an option's name without dashes, or a config key.

    Raises:
        ValueError: the file cannot be read, is not YAML that OmegaConf accepts, or holds no mapping.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    said = f"{option}={str(path)!r}"
    try:
        found = OmegaConf.load(path)
    except OSError as error:  # OmegaConf raises one of its own, without strerror, for a file that holds a bare value
        raise ValueError(f"{said}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{said}: cannot be read: not UTF-8") from error
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        where = f"line {at.line + 1}, column {at.column + 1}: " if at else ""
        raise ValueError(f"{said}: not YAML: {where}{error.problem}") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{said}: not YAML: {_first_line(error)}") from error
    if not OmegaConf.is_dict(found):
        raise ValueError(f"{said}: expected a mapping at its root")
    return found


def select(config, key: str, path: str | Path, option: str, plain: bool = True):
    """Return what a config that :func:`read_yaml` has read holds at a dotted key; None if there is nothing.

    Args:
        path, option: as they were given to :func:`read_yaml`.
        plain: whether a section is returned as plain data, with its interpolations resolved, or as an OmegaConf config.

    Raises:
        ValueError: something on the way to the key is no mapping, or an interpolation cannot be resolved.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = OmegaConf.select(config, key)
        return OmegaConf.to_container(found, resolve=True) if plain and OmegaConf.is_config(found) else found
    except OmegaConfBaseException as error:
        raise ValueError(f"{option}={str(path)!r}: {key}: {_first_line(error)}") from error


def read_json(path: str | Path) -> dict:
    """Return the object that a JSON file holds.

    Raises:
        ValueError: the file is not JSON, or it holds something other than an object.
        OSError: the file cannot be read.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path}: not JSON: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
