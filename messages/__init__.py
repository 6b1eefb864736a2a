"""Everything that travels: frozen, tagged, versioned msgspec structs. Data only; imports nobody.

Weights never travel: a message names a tensor by artifact, file and byte range, or a live object by its id.
"""

from .config import (
    CapacityPolicy,
    Config,
    Mode,
    PackingPolicy,
    ProductionPolicy,
    RemotePolicy,
    Representation,
    RuntimePolicy,
    Validation,
    WaitPolicy,
)
from .failure import Code, Failure, HostWeightsError, Stage
from .journal import JournalPolicy
from .registry import AnyMessage
from .topology import Topology, plan_topology

__all__ = [
    "AnyMessage",
    "CapacityPolicy",
    "Code",
    "Config",
    "Failure",
    "HostWeightsError",
    "JournalPolicy",
    "Mode",
    "PackingPolicy",
    "ProductionPolicy",
    "RemotePolicy",
    "Representation",
    "RuntimePolicy",
    "Stage",
    "Topology",
    "Validation",
    "WaitPolicy",
    "plan_topology",
]
