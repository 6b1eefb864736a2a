"""Measures one model: publication, a warm restore, and streamed forwards with their timeline."""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

import anyio
import msgspec
import torch
from anyio import to_thread

from hostweights.actors import Attachment, HostWeights, LoadedModel, Warmed, warm
from hostweights.actors.ports.faults import answered
from hostweights.bench.forwards import Resident, on, outputs, resident, same
from hostweights.bench.results import Amount, BlockRow, Limit, Measurement, Span, Streamed
from hostweights.bench.subject import Subject, inputs_of
from hostweights.messages.config import Config, Mode
from hostweights.messages.failure import Code, Stage

_COPY_BYTES: Final = 64 << 20
_POLL_S: Final = 0.01
_NO_INPUTS: Final = (
    "no forward was run: this class says nothing of its inputs; give --inputs MODULE:CALLABLE, which is called with "
    "the module and returns the keyword arguments of one forward"
)

Say = Callable[[str], None]


async def measure(
    config: Config, subject: Subject, *, device: str, slots: int, forwards: int, say: Say
) -> tuple[Measurement, dict[str, object]]:
    """The measurement, and the Chrome trace of its streamed forwards. Raises HostWeightsError."""
    source = subject.source
    say(f"publishing {source.name}")
    made = await to_thread.run_sync(
        lambda: warm(config, source.factory, source.source, record=source.record, name=source.name)
    )
    say("restoring it from the store")
    async with HostWeights(config) as host:
        began_s = time.perf_counter()
        model = await host.load(
            source.factory, source.source, record=source.record, name=source.name, mode=Mode.REQUIRED
        )
        restore_s = time.perf_counter() - began_s
        given = await to_thread.run_sync(inputs_of, subject, model.module)
        streamed, beside, trace, block_bytes = None, None, dict[str, object](), 0
        memory = [Amount(name="artifact", size_bytes=made.size_bytes)]
        if given is not None:
            say(f"streaming {forwards} forwards through {slots} slots of {device}")
            beside = await to_thread.run_sync(_tried, model.module, given, device)
            attachment = await host.attach(model, device=device, slots=slots)
            block_bytes = attachment.info.block_bytes
            streamed, trace = await _stream(attachment, model, on(given, device), beside, forwards)
            memory.append(Amount(name=f"{slots} slots", size_bytes=slots * attachment.info.slot_bytes))
        memory += await _memory(host)
    return (
        _measurement(made, memory, streamed, restore_s=restore_s, beside=beside, block_bytes=block_bytes),
        trace,
    )


def _tried(module: torch.nn.Module, given: Mapping[str, Any], device: str) -> Resident:
    with answered(Stage.RUNTIME, Code.MODEL_FAILED, "the forward failed; see what --inputs gives it"):
        return resident(module, given, device)


def _measurement(
    made: Warmed,
    memory: list[Amount],
    streamed: Streamed | None,
    *,
    restore_s: float,
    beside: Resident | None,
    block_bytes: int,
) -> Measurement:
    return Measurement(
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        versions=", ".join(
            [
                f"hostweights {version('hostweights')}",
                f"torch {torch.__version__}",
                f"python {platform.python_version()}",
            ]
        ),
        model=made.name,
        artifact_bytes=made.size_bytes,
        block_bytes=block_bytes,
        built=made.built,
        publish_s=made.seconds,
        restore_s=restore_s,
        resident_device="" if beside is None else beside.device,
        resident_forward_s=None if beside is None else beside.forward_s,
        streamed=streamed,
        memory=tuple(memory),
        note="" if streamed is not None else _NO_INPUTS,
    )


async def _stream(
    attachment: Attachment, model: LoadedModel, given: Mapping[str, Any], beside: Resident, forwards: int
) -> tuple[Streamed, dict[str, object]]:
    first = await to_thread.run_sync(outputs, model.module, given)
    on_cpu = attachment.info.device == "cpu"
    alike = torch.device(beside.device).type == torch.device(attachment.info.device).type  # another rounds otherwise
    equal = same(first, beside.outputs) if alike else None
    registered_s = await _registered(attachment)
    await to_thread.run_sync(outputs, model.module, given)  # the first with every page registered
    before = await attachment.stats()
    async with attachment.record() as timeline:
        began_s = time.perf_counter()
        for _ in range(forwards):
            await to_thread.run_sync(outputs, model.module, given)
        forward_s = (time.perf_counter() - began_s) / forwards
    after = await attachment.stats()
    copied_bytes = after.copied_bytes - before.copied_bytes
    rows = msgspec.convert(timeline.table(), tuple[BlockRow, ...], from_attributes=True)
    limits = _limits(rows, forwards)
    if on_cpu:
        bytes_per_s = await to_thread.run_sync(_memcpy_bytes_per_s)
        seconds = copied_bytes / forwards / bytes_per_s
        limits.append(Limit(name=f"copies at {bytes_per_s / 1e9:.1f} GB/s, a plain copy", seconds=seconds))
    streamed = Streamed(
        device=attachment.info.device,
        slots=after.slots,
        registered_s=registered_s,
        forwards=forwards,
        forward_s=forward_s,
        copied_bytes=copied_bytes,
        stalls=after.stalls - before.stalls,
        stall_s=after.stall_s - before.stall_s,
        equal=equal,
        limits=tuple(limits),
        blocks=rows,
        spans=msgspec.convert(timeline.intervals, tuple[Span, ...], from_attributes=True),
    )
    return streamed, timeline.chrome_trace()


async def _registered(attachment: Attachment) -> float | None:
    """Wait for the driver to have pinned the pages, which holds up its other calls; how long that took, if it did."""
    while (info := (await attachment.stats()).registration) is not None and info.state == "running":  # noqa: ASYNC110
        await anyio.sleep(_POLL_S)  # nothing announces its end
    return None if info is None or not info.registered_bytes else info.seconds


def _limits(rows: Sequence[BlockRow], forwards: int) -> list[Limit]:
    return [
        Limit(name="compute alone", seconds=sum(row.compute_s for row in rows) / forwards),
        Limit(name="copies alone, as measured", seconds=sum(row.copy_s for row in rows) / forwards),
    ]


async def _memory(host: HostWeights) -> list[Amount]:
    found = await host.memory()
    return [
        Amount(name="private to this process", size_bytes=found.process.private_bytes),
        Amount(name="weights mapped (PSS)", size_bytes=sum(mapping.pss_bytes for mapping in found.mappings)),
    ]


def _memcpy_bytes_per_s() -> float:
    source, target = torch.ones(_COPY_BYTES, dtype=torch.uint8), torch.empty(_COPY_BYTES, dtype=torch.uint8)
    spent: list[float] = []
    for _ in range(5):
        began_s = time.perf_counter()
        target.copy_(source)
        spent.append(time.perf_counter() - began_s)
    return _COPY_BYTES / min(spent)
