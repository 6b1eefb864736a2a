"""E4: what a host does, counted; as Prometheus text and OpenTelemetry spans."""

import re
from pathlib import Path

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import tiny_model
from hostweights import Config, HostWeights, HostWeightsError
from hostweights.messages.report import Outcome, PublicationOutcome
from hostweights.observe import Instruments, Observer, Snapshot
from hostweights.observe.metrics import Collector, render
from hostweights.observe.tracing import open_telemetry_spans, traced

pytestmark = pytest.mark.asyncio


async def served(tmp_path: Path, instruments: Instruments) -> Snapshot:
    """A cold load that is published and adopted, a warm one that streams one forward, and one that fails."""
    path = tiny_model.make_checkpoint(tmp_path)
    config = Config(root=str(tmp_path / "store"))
    async with HostWeights(config, instruments=instruments) as host, Observer(host, name="worker-1") as observer:
        cold = await host.load(tiny_model.factory(), path)
        assert cold.publication is not None
        await cold.publication.wait()
        warm = await host.load(tiny_model.factory(), path)
        await host.attach(warm)
        tiny_model.run(warm.module)
        with pytest.raises(HostWeightsError):
            await host.load(tiny_model.factory(), tmp_path / "absent")
        return await observer.snapshot()


async def test_E4_a_snapshot_counts_what_happened(tmp_path: Path) -> None:
    snapshot = await served(tmp_path, Instruments())

    assert snapshot.resolutions == {Outcome.CANONICAL: 1, Outcome.LOCAL_HIT: 1, Outcome.FAILED: 1}
    assert snapshot.resolution_s.keys() == snapshot.resolutions.keys()
    assert snapshot.publications == {PublicationOutcome.PUBLISHED: 1}
    assert len(snapshot.stats.leases) == 2
    assert snapshot.leased_bytes == snapshot.stats.leases[0].size_bytes
    assert snapshot.shared_bytes > 0
    assert snapshot.builds == ()
    assert snapshot.missed_events == 0
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot


async def test_E4_metrics_are_prometheus_text_with_every_number(tmp_path: Path) -> None:
    snapshot = await served(tmp_path, Instruments())

    text = render([snapshot, msgspec.structs.replace(snapshot, name="worker-2")]).decode()

    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    ring = snapshot.stats.attachments[0].ring
    for process in ("worker-1", "worker-2"):
        mine = ("process", process)
        assert samples["hostweights_leases", (mine,)] == 2
        assert samples["hostweights_resolution_seconds_count", (("outcome", "local_hit"), mine)] == 1
        assert samples["hostweights_publications_total", (("outcome", "published"), mine)] == 1
        assert samples["hostweights_ring_copies_total", (("device", "cpu"), mine)] == ring.copies > 0
        assert samples["hostweights_ring_stalls_total", (("device", "cpu"), mine)] == ring.stalls
        assert samples["hostweights_mailbox_length", (("actor", "store"), mine)] == 0
        assert samples["hostweights_restarts_total", (("actor", "transport"), mine)] == 0
        assert samples["hostweights_shared_bytes", (mine,)] == snapshot.shared_bytes
        handled = (("actor", "resolver"), ("ended", "replied"), ("message", "Resolve"), mine)
        assert samples["hostweights_handled_total", handled] == 3
        bucket = (("actor", "resolver"), ("le", "+Inf"), ("message", "Resolve"), mine)
        assert samples["hostweights_handler_seconds_bucket", bucket] == 3


async def test_E4_buckets_grow_and_hold_everything(tmp_path: Path) -> None:
    snapshot = await served(tmp_path, Instruments())

    by_message: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for family in text_string_to_metric_families(render([snapshot]).decode()):
        for sample in family.samples:
            if sample.name == "hostweights_handler_seconds_bucket":
                key = sample.labels["actor"], sample.labels["message"]
                by_message.setdefault(key, []).append((float(sample.labels["le"]), sample.value))

    assert len(by_message) == len(snapshot.stats.runtime.messages)
    for stats in snapshot.stats.runtime.messages:
        buckets = by_message[stats.actor, stats.message]
        assert buckets == sorted(buckets)
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        assert [end_s for end_s, _ in buckets[-1:]] == [float("inf")]
        assert [count for _, count in buckets[-1:]] == [sum(stats.handled)]
        for end_s, count in buckets[:-1]:
            below = [n for number, n in enumerate(stats.handled) if 2.0**number * 1e-6 <= end_s * 1.001]
            assert count == sum(below)


async def test_E4_a_registry_of_the_users_own_can_hold_them(tmp_path: Path) -> None:
    snapshot = await served(tmp_path, Instruments())
    registry = CollectorRegistry()
    shown: list[Snapshot] = []
    registry.register(Collector(lambda: shown))
    assert b"worker-1" not in generate_latest(registry)

    shown.append(snapshot)

    assert b'hostweights_leases{process="worker-1"} 2.0' in generate_latest(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Collector(lambda: ()))


async def test_E4_without_instruments_everything_but_latencies_is_there(tmp_path: Path) -> None:
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host, Observer(host) as observer:
        snapshot = await observer.snapshot()

    text = render([snapshot]).decode()
    assert snapshot.stats.runtime.messages == ()
    assert re.search(r'hostweights_leases\{process="process-\d+"\} 0\.0', text)
    assert "hostweights_handler_seconds_bucket" not in text


@pytest.mark.parametrize(("every_s", "measured"), [(3600.0, 1), (0.0, 2)])
async def test_E4_memory_is_not_measured_at_every_look(tmp_path: Path, every_s: float, measured: int) -> None:
    async with HostWeights(Config(root=str(tmp_path / "store")), instruments=Instruments()) as host:
        async with Observer(host, memory_every_s=every_s) as observer:
            await observer.snapshot()
            await observer.snapshot()
        messages = (await host.stats()).runtime.messages

    (memory,) = [each for each in messages if each.message == "ReadMemory"]
    assert sum(memory.handled) == measured


async def test_E4_spans_of_a_request_form_one_tree(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    instruments = Instruments(on_span=open_telemetry_spans(SimpleSpanProcessor(exporter)))
    path = tiny_model.make_checkpoint(tmp_path)
    trace_id, request_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    async with HostWeights(Config(root=str(tmp_path / "store")), instruments=instruments) as host:
        with traced(f"00-{trace_id}-{request_id}-01"):
            model = await host.load(tiny_model.factory(), path)
        assert model.publication is not None
        await model.publication.wait()
        with pytest.raises(HostWeightsError):
            await host.load(tiny_model.factory(), tmp_path / "absent", timeout_s=1e-9)

    assert instruments.failure is None
    spans = [span for span in exporter.get_finished_spans() if _context(span).trace_id == int(trace_id, 16)]
    ids = {_context(span).span_id for span in spans} | {int(request_id, 16)}
    assert {span.name for span in spans} >= {"resolver Resolve", "store Lookup"}
    for span in spans:
        assert span.parent is not None
        assert span.parent.span_id in ids
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time


def _context(span: ReadableSpan) -> SpanContext:
    context: SpanContext | None = span.get_span_context()
    assert context is not None
    return context


async def test_E4_of_two_processes_of_one_name_the_newer_is_shown(tmp_path: Path) -> None:
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host, Observer(host, name="worker-1") as observer:
        older = await observer.snapshot()
    newer = msgspec.structs.replace(older, started_unix_s=older.started_unix_s + 1.0, missed_events=7)

    for order in ((older, newer), (newer, older)):
        lines = [line for line in render(order).decode().splitlines() if line.startswith("hostweights_missed_events_t")]
        assert lines == ['hostweights_missed_events_total{process="worker-1"} 7.0']
