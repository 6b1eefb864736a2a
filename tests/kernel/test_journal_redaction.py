"""D3: a journal without file names; what it cannot write ends it, and the work goes on."""

import os
from pathlib import Path

import msgspec
import pytest

from hostweights.actors.kernel import ActorSpec, ActorSystem
from hostweights.actors.kernel.journal_redaction import Redactor
from hostweights.messages.base import Message
from hostweights.messages.failure import Code
from hostweights.messages.journal import Dequeued, JournalPolicy
from journal_kit import Echo, read

BATCH = 200
"""Asks that fill a batch, so that it is encoded while the actor serves."""


class Open(Message, frozen=True, kw_only=True, tag="t.redaction.open"):
    """Names a file, or whatever a test puts there."""

    path: object


def nested(depth: int) -> object:
    """Deeper than any encoder goes."""
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.asyncio
@pytest.mark.parametrize("redact", [False, True], ids=["plain", "redacted"])
@pytest.mark.parametrize(
    "value", [object(), nested(100_000), "no \udcff text"], ids=["no type for it", "too deep", "no text"]
)
async def test_D3_a_record_that_has_no_form_ends_the_journal_and_not_the_actor(
    tmp_path: Path, value: object, redact: bool
) -> None:
    path = tmp_path / "run.journal"
    system = ActorSystem(JournalPolicy(path=str(path), redact_paths=redact))
    async with system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Open,)))
        await system.ask("a", Open(path="before"))
        for _ in range(BATCH):
            assert (await system.ask("a", Open(path=value), timeout_s=30.0)) is not None
        failure = system.stats().journal_failure
        assert failure is not None
        assert failure.code is Code.UNSUPPORTED
        assert "journal.dequeued cannot be written" in failure.text
        assert system.failure is None
    records, torn = read(path)
    assert torn == 0
    dequeued = [record for record in records if isinstance(record, Dequeued)]
    assert [msgspec.msgpack.decode(record.envelope.body, type=Open).path for record in dequeued] == ["before"]


@pytest.mark.asyncio
async def test_D3_a_path_that_is_no_unicode_is_redacted_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    async with ActorSystem(JournalPolicy(path=str(path), redact_paths=True)) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Open,)))
        for _ in range(BATCH):
            await system.ask("a", Open(path=os.fsdecode(b"/data/model-\xff")), timeout_s=30.0)
        assert system.stats().journal_failure is None
    records, _ = read(path)
    bodies = {bytes(record.envelope.body) for record in records if isinstance(record, Dequeued)}
    assert len(bodies) == 1
    named = msgspec.msgpack.decode(bodies.pop(), type=Open).path
    assert isinstance(named, str)
    assert named.count("/p-") == 2


def test_D3_a_path_is_hidden_however_many_odd_ones_came_before() -> None:
    """Odd ones hold a space or the like, so that no sentence shows where they end."""
    redactor = Redactor()
    for n in range(1100):
        redactor.record({"path": f"/mnt/disk {n}/hidden"})
    path = "/mnt/My Disk/hidden (1)"
    later = redactor.record({"text": f"{path}/x: gone", "path": path, "url": f"file://{path}"})
    assert isinstance(later, dict)
    assert not any(name in f"{later}" for name in ("mnt", "My", "Disk", "hidden", "(1)"))
    assert later["url"] == f"file://{later['path']}"
    assert later["text"].startswith(f"{later['path']}/p-")
    assert later["text"].endswith(": gone")


def test_D3_a_path_under_an_odd_one_that_a_field_named_is_hidden_in_a_sentence() -> None:
    redactor = Redactor()
    named = redactor.record({"path": "/mnt/My Disk/leases/1"})
    later = redactor.record({"text": "could not open /mnt/My Disk/leases/2: gone"})
    assert isinstance(named, dict)
    assert isinstance(later, dict)
    folder = named["path"].rpartition("/")[0]
    assert later["text"].startswith(f"could not open {folder}/p-")
    assert later["text"].endswith(": gone")


def test_D3_a_path_in_a_sentence_ends_where_a_known_one_begins() -> None:
    written = Redactor().record({"text": "/mnt/My Disk/x=/it's/hidden", "paths": ("/mnt/My Disk", "/it's/hidden")})
    assert isinstance(written, dict)
    first, second = written["paths"]
    assert written["text"].startswith(f"{first}/p-")
    assert written["text"].endswith(second)
    assert first.count("/p-") == second.count("/p-") == 2


def test_D3_paths_in_a_list_are_hidden_as_a_whole() -> None:
    written = Redactor().record({"paths": ["/mnt/My Disk/hidden", "/mnt/My Disk"]})
    assert isinstance(written, dict)
    assert [path.count("/p-") for path in written["paths"]] == [3, 2]
    assert not any(name in f"{written}" for name in ("My", "Disk"))
