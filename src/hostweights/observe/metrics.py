"""Snapshots as Prometheus metrics (extra ``metrics``).

One process answers for all of a root: ``render((await ask_all())[0])``. Counters are those of each process since it was
observed, with its name as the label ``process``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as PrometheusCollector

from hostweights.messages.transport import RingStats
from hostweights.observe.snapshot import Snapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_Gauge = tuple[str, str, Callable[[Snapshot], float]]
_GAUGES: Final[tuple[_Gauge, ...]] = (
    ("leases", "Leases held.", lambda each: len(each.stats.leases)),
    ("leased_bytes", "Sizes of the leased artifacts.", lambda each: each.leased_bytes),
    ("shared_bytes", "Resident bytes of leased artifacts in the page cache.", lambda each: each.shared_bytes),
    (
        "proportional_bytes",
        "The process's share of the mapped bytes (PSS); all processes together give what the host holds.",
        lambda each: sum(mapping.pss_bytes for mapping in each.memory.mappings),
    ),
    ("private_bytes", "Anonymous memory of the process.", lambda each: each.memory.process.private_bytes),
    ("attachments", "Models that stream.", lambda each: len(each.stats.attachments)),
    ("publications_running", "Publications under way.", lambda each: len(each.stats.publications)),
)

_Ring = tuple[str, str, Callable[[RingStats], float]]
_RINGS: Final[tuple[_Ring, ...]] = (
    ("ring_forwards", "Forwards of streamed models.", lambda ring: ring.forwards),
    ("ring_copies", "Blocks copied into a slot.", lambda ring: ring.copies),
    ("ring_copied_bytes", "Bytes copied into slots.", lambda ring: ring.copied_bytes),
    ("ring_hits", "Blocks that were in a slot when compute came to them.", lambda ring: ring.hits),
    ("ring_stalls", "Blocks that compute waited for.", lambda ring: ring.stalls),
    ("ring_stall_seconds", "Time that compute waited for blocks.", lambda ring: ring.stall_s),
    ("ring_wrong_guesses", "Blocks that were copied and overwritten unused.", lambda ring: ring.wrong_guesses),
)


class Collector(PrometheusCollector):
    """For a registry of your own: ``registry.register(Collector(lambda: snapshots))``."""

    def __init__(self, snapshots: Callable[[], Iterable[Snapshot]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """The families of the snapshots as they are now."""
        return families(tuple(self._snapshots()))

    def describe(self) -> Iterator[Metric]:
        """Names and types, of no process."""
        return families(())


def render(snapshots: Iterable[Snapshot]) -> bytes:
    """The Prometheus text of some processes' snapshots; to be sent as ``CONTENT_TYPE``."""
    taken = tuple(snapshots)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(lambda: taken))
    return generate_latest(registry)


def families(snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    """The metric families, each with every process; of two of one name, as while one replaces the other, the newer."""
    newest = {each.name: each for each in sorted(snapshots, key=lambda each: each.started_unix_s)}
    snapshots = tuple(newest.values())
    for name, words, value in _GAUGES:
        gauge = GaugeMetricFamily(f"hostweights_{name}", words, labels=("process",))
        for each in snapshots:
            gauge.add_metric((each.name,), value(each))
        yield gauge
    yield _resolutions(snapshots)
    yield _labelled(
        "publications",
        "Background publications that ended.",
        "outcome",
        ((each.name, outcome, count) for each in snapshots for outcome, count in each.publications.items()),
    )
    yield from _rings(snapshots)
    yield from _actors(snapshots)
    yield from _messages(snapshots)


def _resolutions(snapshots: Sequence[Snapshot]) -> Metric:
    words = "Loads that ended, by outcome, and how long they took."
    summary = SummaryMetricFamily("hostweights_resolution_seconds", words, labels=("process", "outcome"))
    for each in snapshots:
        for outcome, count in each.resolutions.items():
            summary.add_metric((each.name, outcome), count, each.resolution_s.get(outcome, 0.0))
    return summary


def _labelled(name: str, words: str, label: str, rows: Iterable[tuple[str, str, float]]) -> Metric:
    counter = CounterMetricFamily(f"hostweights_{name}", words, labels=("process", label))
    for process, value, count in rows:
        counter.add_metric((process, value), count)
    return counter


def _rings(snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    """Summed over the attachments to one device: they come and go, and an id of each would be a series of its own."""
    for name, words, value in _RINGS:
        counter = CounterMetricFamily(f"hostweights_{name}", words, labels=("process", "device"))
        for each in snapshots:
            for device in sorted({attachment.info.device for attachment in each.stats.attachments}):
                rings = [item.ring for item in each.stats.attachments if item.info.device == device]
                counter.add_metric((each.name, device), sum(value(ring) for ring in rings))
        yield counter


def _actors(snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    rows = [(each.name, actor) for each in snapshots for actor in each.stats.runtime.actors]
    length = GaugeMetricFamily("hostweights_mailbox_length", "Messages queued.", labels=("process", "actor"))
    age = GaugeMetricFamily(
        "hostweights_mailbox_oldest_seconds",
        "How long the first queued message has waited.",
        labels=("process", "actor"),
    )
    for process, actor in rows:
        length.add_metric((process, actor.name), actor.mailbox_length)
        age.add_metric((process, actor.name), actor.oldest_age_s)
    yield length
    yield age
    yield _labelled(
        "restarts", "Restarts of an actor.", "actor", ((process, actor.name, actor.restarts) for process, actor in rows)
    )
    yield _labelled(
        "dead_letters",
        "Messages that no handler saw and replies that nobody waited for.",
        "reason",
        ((each.name, why, count) for each in snapshots for why, count in each.stats.runtime.dead_letters.items()),
    )
    missed = CounterMetricFamily("hostweights_missed_events", "Events that were not counted.", labels=("process",))
    for each in snapshots:
        missed.add_metric((each.name,), each.missed_events)
    yield missed


def _messages(snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    labels = ("process", "actor", "message")
    ended = CounterMetricFamily("hostweights_handled", "Handlers that ended.", labels=(*labels, "ended"))
    handled = HistogramMetricFamily("hostweights_handler_seconds", "How long handlers took.", labels=labels)
    waited = HistogramMetricFamily("hostweights_mailbox_wait_seconds", "How long messages were queued.", labels=labels)
    for each in snapshots:
        for stats in each.stats.runtime.messages:
            names = (each.name, stats.actor, stats.message)
            for how, count in stats.ended.items():
                ended.add_metric((*names, how), count)
            handled.add_metric(names, _buckets(stats.handled), None)
            waited.add_metric(names, _buckets(stats.waited), None)
    yield ended
    yield handled
    yield waited


def _buckets(counts: tuple[int, ...]) -> list[tuple[str, float]]:
    """Bucket n ends at 2**n microseconds; Prometheus counts all below an end. Every second end is enough for it."""
    total, rows = 0, []
    for number, count in enumerate(counts):
        total += count
        if number == len(counts) - 1:
            rows.append(("+Inf", float(total)))
        elif number % 2 == 0:
            rows.append((repr(float(2**number) * 1e-6), float(total)))
    return rows
