"""Handled messages as OpenTelemetry spans (``pip install opentelemetry-sdk``).

spans = open_telemetry_spans(BatchSpanProcessor(OTLPSpanExporter()))
async with HostWeights(config, instruments=Instruments(on_span=spans)) as host:
    with traced(request.headers["traceparent"]):
        model = await host.load(...)  # what the actors do for it are children of the request's span
"""

import time
from collections.abc import Callable
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from hostweights.actors.kernel.instruments import Span, traced
from hostweights.messages.journal import Ended

__all__ = ["open_telemetry_spans", "traced"]

_NS: Final = 1_000_000_000


def open_telemetry_spans(
    processor: SpanProcessor, *, resource: Resource | None = None, clock: Callable[[], float] = time.monotonic
) -> Callable[[Span], None]:
    """What ``Instruments(on_span=...)`` calls: each handled message ends as one span, handed to ``processor``.

    Spans keep the ids that the runtime gave them, so that the messages of one request form one tree. It is called on
    the event loop: use a processor that exports elsewhere, as the batching one does. ``clock`` is the loop's clock
    (asyncio's and uvloop's are both the monotonic one).
    """
    scope = InstrumentationScope("hostweights")
    where = Resource.create() if resource is None else resource

    def on_span(span: Span) -> None:
        offset_s = time.time() - clock()
        well = span.ended is Ended.REPLIED
        processor.on_end(
            ReadableSpan(
                name=f"{span.actor} {span.message}",
                context=_context(span.trace),
                parent=None if span.parent is None else _context(span.parent),
                resource=where,
                kind=SpanKind.INTERNAL,
                attributes={
                    "hostweights.actor": span.actor,
                    "hostweights.message": span.message,
                    "hostweights.ended": span.ended.value,
                    "hostweights.waited_s": max(0.0, span.started_s - span.accepted_s),
                },
                status=Status(StatusCode.UNSET) if well else Status(StatusCode.ERROR, span.ended.value),
                start_time=int((span.started_s + offset_s) * _NS),
                end_time=int((span.ended_s + offset_s) * _NS),
                instrumentation_scope=scope,
            )
        )

    return on_span


def _context(traceparent: str) -> SpanContext:
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(int(flags, 16)))
