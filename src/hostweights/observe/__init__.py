"""Seeing what a process does: snapshots, a socket that gives them out, Prometheus metrics, JSON logs, spans.

    async with HostWeights(config, instruments=Instruments()) as host, Observer(host, name="worker-1") as observer:
        async with Endpoint(observer.snapshot):  # `hostweights top` and the other workers find it there
            ...

``hostweights.observe.metrics`` needs prometheus-client (extra ``metrics``), ``hostweights.observe.tracing`` the API of
OpenTelemetry; the rest needs nothing.
"""

from hostweights.actors.kernel.instruments import Instruments
from hostweights.observe.endpoint import Endpoint, Unreachable, ask, ask_all, runtime_directory
from hostweights.observe.logs import JsonFormatter
from hostweights.observe.observer import Observer
from hostweights.observe.snapshot import Snapshot

__all__ = [
    "Endpoint",
    "Instruments",
    "JsonFormatter",
    "Observer",
    "Snapshot",
    "Unreachable",
    "ask",
    "ask_all",
    "runtime_directory",
]
