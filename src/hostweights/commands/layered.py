"""The settings of a command: the layers of ``hostweights.settings``, and what its own options say over them."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostweights.messages.config import Config


def layered_config(root: Path | None = None, **options: object) -> "Config":
    """The config; an option that is None leaves the setting as the layers have it.

    ``options`` are named as settings are, with two underlines for the dot. Raises HostWeightsError(invalid_config).
    """
    from hostweights.settings import read_config

    place = None if root is None else str(root.absolute())
    flags = {name.replace("__", "."): value for name, value in options.items()}
    return read_config(flags={"root": place, **flags})


def layered_config_of_user(root: Path | None) -> "Config":
    """As ``layered_config``; where no layer sets a root, it is ``~/.cache/hostweights``."""
    from hostweights.settings import Origin, read_settings

    origins = {row.name: row.origin for row in read_settings().rows}
    if root is None and origins["root"] is Origin.UNSET:
        root = Path.home() / ".cache" / "hostweights"
    return layered_config(root)
