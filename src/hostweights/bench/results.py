"""What a measurement gives; JSON as it stands."""

from hostweights.messages.base import Count, Record, Seconds, SizeBytes, Text


class Span(Record, frozen=True, kw_only=True):
    """``kind`` is copy, stall or compute; seconds count from the recording's start."""

    kind: Text
    block: Count
    begin_s: float
    end_s: float


class BlockRow(Record, frozen=True, kw_only=True):
    """One block over all recorded forwards."""

    path: Text
    uses: Count
    copies: Count
    copy_s: Seconds
    compute_s: Seconds
    stall_s: Seconds


class Amount(Record, frozen=True, kw_only=True):
    """Some memory by name."""

    name: Text
    size_bytes: SizeBytes


class Limit(Record, frozen=True, kw_only=True):
    """How long one forward would take if only this counted."""

    name: Text
    seconds: Seconds


class Streamed(Record, frozen=True, kw_only=True):
    """Streamed forwards; ``forward_s`` is the mean of those recorded.

    ``registered_s``: how long the driver took to pin the pages, beside the first forwards; None where none were.
    ``equal``: to the resident output, bit by bit; None where that was computed on another device, where the
    whole model does not fit on this one.
    """

    device: Text
    slots: Count
    registered_s: Seconds | None
    forwards: Count
    forward_s: Seconds
    copied_bytes: SizeBytes
    stalls: Count
    stall_s: Seconds
    equal: bool | None
    limits: tuple[Limit, ...]
    blocks: tuple[BlockRow, ...]
    spans: tuple[Span, ...]


class Measurement(Record, frozen=True, kw_only=True):
    """One model on one machine. ``streamed`` is None where the model has no known inputs; ``note`` says so."""

    machine: Text
    versions: Text
    model: Text
    artifact_bytes: SizeBytes
    block_bytes: SizeBytes
    built: bool
    publish_s: Seconds
    restore_s: Seconds
    resident_device: Text
    resident_forward_s: Seconds | None
    streamed: Streamed | None
    memory: tuple[Amount, ...]
    note: Text = ""
