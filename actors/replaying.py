"""The four actors for a replay: the same code on ports that are never called, since effects come from the journal."""

from collections.abc import Callable
from typing import NoReturn

import msgspec

from ..messages.failure import Code, Stage, error
from .kernel.contract import Actor
from .publisher import PublisherActor
from .resolver import ResolverActor
from .store import StoreActor
from .transport import TransportActor


class _NoPort:
    """Stands where a port would be; a replay performs nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"a replay called {name} on a port")


def replayable(name: str) -> Callable[[msgspec.Raw], Actor]:
    """What ``kernel.replay.replay`` needs to build an actor of a recorded HostWeights.

    ``name`` is store, resolver, publisher or transport; anything else raises HostWeightsError(invalid_config).
    """
    port: object = _NoPort()
    create: dict[str, Callable[[], Actor]] = {
        "store": lambda: StoreActor(port),  # type: ignore[arg-type]  # never called
        "resolver": lambda: ResolverActor(port),  # type: ignore[arg-type]  # never called
        "publisher": lambda: PublisherActor(port),  # type: ignore[arg-type]  # never called
        "transport": lambda: TransportActor(port),  # type: ignore[arg-type]  # never called
    }
    if name not in create:
        text = f"there is no actor {name!r}; a recording has {', '.join(create)}"
        raise error(Stage.RUNTIME, Code.INVALID_CONFIG, text)
    return lambda settings: create[name]()  # noqa: ARG005  # the actors have no settings
