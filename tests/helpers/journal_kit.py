"""The simplest actor, and what a journal holds of it."""

# ruff: noqa: ARG002 - the protocol's signature
from pathlib import Path

import loop_guard
from hostweights.actors.kernel import Context
from hostweights.actors.kernel.journal_file import JournalReader
from hostweights.messages.base import Message
from hostweights.messages.journal import JournalRecord


class Echo:
    """Answers with what it got."""

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        return message

    async def perform(self, effect: Message, context: Context) -> Message:
        return effect

    async def stopped(self, context: Context) -> None: ...


def read(path: Path) -> tuple[list[JournalRecord], int]:
    """A journal's records, and the bytes of a torn one."""
    with loop_guard.allowed(), JournalReader(path) as reader:
        return list(reader), reader.torn_bytes
