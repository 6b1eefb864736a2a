"""What ``MODULE:CALLABLE`` on the command line leads to."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostweights.actors.ports.faults import answered
from hostweights.messages.failure import Code, Stage, error


def callable_named(option: str, text: str) -> Callable[..., Any]:
    """The callable that ``option`` names with ``text``; raises HostWeightsError(invalid_config).

    The working directory is the first place where modules are looked for, from now on: what the callable imports when
    it is called is found there too.
    """
    module, _, name = text.partition(":")
    expected = "expected MODULE:CALLABLE, a module as import has it and a name in it"
    if not module or module.startswith("."):
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, f"{option} {text} names no module; {expected}")
    here = str(Path.cwd())
    if here not in sys.path[:1]:
        sys.path.insert(0, here)
    with answered(Stage.CONFIGURATION, Code.INVALID_CONFIG, f"{option} {text} cannot be imported"):
        found: object = vars(importlib.import_module(module)).get(name)
    if not callable(found):
        what = f"has no {name!r}" if found is None else f"has {name}, which is no callable but a {type(found).__name__}"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, f"{option} {text}: {module} {what}; {expected}")
    return found
