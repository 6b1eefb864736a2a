"""Everything that travels: frozen, tagged, versioned msgspec structs. Data only; imports nobody.

Weights never travel: a message names a tensor by artifact, file and byte range, or a live object by its id.
"""

from .config import (
    CapacityPolicy,
    Config,
    Mode,
    ProductionPolicy,
    RemotePolicy,
    Representation,
    RuntimePolicy,
    Validation,
    WaitPolicy,
)
from .failure import Code, Failure, HostWeightsError, Stage
from .registry import AnyMessage

__all__ = [
    "AnyMessage",
    "CapacityPolicy",
    "Code",
    "Config",
    "Failure",
    "HostWeightsError",
    "Mode",
    "ProductionPolicy",
    "RemotePolicy",
    "Representation",
    "RuntimePolicy",
    "Stage",
    "Validation",
    "WaitPolicy",
]
