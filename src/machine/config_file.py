"""config.toml on disk, and the settings that come from the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ..opening import TYPE_CHECKING
from ..values.config import Config, parse_config
from ..values.errors import NexusError
from ..values.schema import check, integer_in
from ..values.text import guess_number, refuse
from ..values.value import replace
from .disk import CONFIG_BYTES, Disk, find_status, is_file, read_text, remove_file, write_if_changed
from .layout import Layout

if TYPE_CHECKING:
    from typing import Any

MOCK_GPUS = {**integer_in(0, 1024), "examples": [2]}


def load_config(disk: Disk, path: str, environ: Mapping[str, str]) -> Config:
    """The configuration in a file; the defaults when there is none.  Raises: usage, unavailable."""
    if find_status(disk, path, is_followed=False) and not is_file(disk, path):
        refuse(f"{path} is no file, or a link that leads to none", hint=f"put one there, or remove it: ls -l {path}")
    text = read_text(disk, path, CONFIG_BYTES)
    data: dict[str, Any] = {}
    if text is not None:
        try:
            if sys.version_info >= (3, 11):
                import tomllib
            else:
                import tomli as tomllib
            data = tomllib.loads(text)
        except ImportError:
            version = ".".join(map(str, sys.version_info[:2]))
            raise NexusError("usage", f"{path} cannot be read: Python {version} has no TOML parser",
                             hint=f"{sys.executable} -m pip install tomli, or use Python 3.11 or newer") from None
        except (ValueError, RecursionError) as error:
            raise NexusError("usage", f"{path} is not valid TOML: {error}",
                             hint="nexus config edit; an example: nexus config sample") from None
    config, mock = parse_config(data, path), environ.get("NEXUS_MOCK_GPUS")
    return replace(config, mock_gpus=check(MOCK_GPUS, guess_number(mock), "NEXUS_MOCK_GPUS")) if mock else config


def choose_config(disk: Disk, layout: Layout) -> str:
    """The last --config, or the default path, which need not exist.  Raises: usage, unavailable."""
    chosen = (read_text(disk, layout.choice_file) or "").strip("\n")
    if chosen and not is_file(disk, chosen):
        raise NexusError("usage", f"there is no file {chosen}, the config file that was chosen last",
                         hint=f"choose another: nexus start --config FILE; the usual one is {layout.config_file}")
    return chosen or layout.config_file


def remember_config(disk: Disk, layout: Layout, path: str) -> None:
    """Start the service with this config file from now on.  Raises: unavailable."""
    if path != layout.config_file:
        write_if_changed(disk, layout.choice_file, path + "\n")
    else:
        remove_file(disk, layout.choice_file)
