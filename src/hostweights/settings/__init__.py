"""Settings in layers: defaults, a TOML file, the environment, flags and a dict, each over the one before.

    config = read_config(file=Path("hostweights.toml"))

Light: neither torch nor the actors are imported.
"""

from .combinations import refuse_wrong_combinations
from .layers import Origin, Setting, Settings, read_config, read_settings, variable_of

__all__ = [
    "Origin",
    "Setting",
    "Settings",
    "read_config",
    "read_settings",
    "refuse_wrong_combinations",
    "variable_of",
]
