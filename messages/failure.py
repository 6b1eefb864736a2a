"""Failures as data, and the one exception that carries them."""

from enum import StrEnum

import msgspec

from .base import Details, Message, Text


class Stage(StrEnum):
    """Where in the work a failure happened."""

    CONFIGURATION = "configuration"
    SOURCE = "source"
    PLANNING = "planning"
    DOMAIN = "domain"
    LOOKUP = "lookup"
    REMOTE = "remote"
    VALIDATION = "validation"
    PRODUCTION = "production"
    CAPACITY = "capacity"
    RESTORATION = "restoration"
    CANONICAL = "canonical"
    PUBLICATION = "publication"
    TRANSPORT = "transport"
    LIFECYCLE = "lifecycle"
    RUNTIME = "runtime"


class Code(StrEnum):
    """What happened, stable across versions; callers branch on this and never on the text."""

    INVALID_CONFIG = "invalid_config"

    SOURCE_MISSING = "source_missing"
    SOURCE_CORRUPT = "source_corrupt"
    SOURCE_CHANGED = "source_changed"
    SOURCE_AMBIGUOUS = "source_ambiguous"

    COVERAGE_INCOMPLETE = "coverage_incomplete"
    SHAPE_MISMATCH = "shape_mismatch"
    DTYPE_UNSUPPORTED = "dtype_unsupported"
    OWNERSHIP_AMBIGUOUS = "ownership_ambiguous"
    BLOCKS_NOT_FOUND = "blocks_not_found"
    MODEL_FAILED = "model_failed"

    DOMAIN_UNAVAILABLE = "domain_unavailable"
    DOMAIN_INCOMPATIBLE = "domain_incompatible"
    DOMAIN_BUSY = "domain_busy"
    FILESYSTEM_REFUSED = "filesystem_refused"
    LOCKS_UNSUPPORTED = "locks_unsupported"
    PERMISSION_DENIED = "permission_denied"
    READ_ONLY = "read_only"

    BUILD_BUSY = "build_busy"
    CAPACITY_EXCEEDED = "capacity_exceeded"
    IO_ERROR = "io_error"
    NO_SPACE = "no_space"

    MANIFEST_CORRUPT = "manifest_corrupt"
    MANIFEST_INCOMPATIBLE = "manifest_incompatible"
    PAYLOAD_MISMATCH = "payload_mismatch"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    PACKING_CORRUPT = "packing_corrupt"
    IDENTITY_COLLISION = "identity_collision"

    PRODUCER_FAILED = "producer_failed"
    PRODUCER_INCOMPLETE = "producer_incomplete"
    PUBLICATION_FAILED = "publication_failed"

    RESTORE_PLAN_FAILED = "restore_plan_failed"
    RESTORE_COMMIT_FAILED = "restore_commit_failed"
    ARTIFACT_MISSING = "artifact_missing"

    LEASE_UNKNOWN = "lease_unknown"
    LEASE_IN_USE = "lease_in_use"
    MODEL_UNKNOWN = "model_unknown"
    NOT_ATTACHED = "not_attached"
    ALREADY_ATTACHED = "already_attached"

    DEVICE_UNAVAILABLE = "device_unavailable"
    REGISTER_FAILED = "register_failed"
    UNREGISTER_FAILED = "unregister_failed"
    SLOTS_EXHAUSTED = "slots_exhausted"
    COPY_FAILED = "copy_failed"
    GROUP_BROKEN = "group_broken"
    GROUP_MISMATCH = "group_mismatch"
    UNSUPPORTED = "unsupported"

    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ACTOR_STOPPED = "actor_stopped"
    MAILBOX_FULL = "mailbox_full"
    OVERLOADED = "overloaded"
    ASK_CYCLE = "ask_cycle"
    HANDLER_FAILED = "handler_failed"
    JOURNAL_CORRUPT = "journal_corrupt"


class Failure(Message, frozen=True, kw_only=True, tag="failure"):
    """A failure: ``text`` names what was found, what was expected and the way out; ``details`` holds the facts.

    ``retryable`` says that the same request may succeed later with nothing changed by the caller.
    """

    stage: Stage
    code: Code
    retryable: bool
    text: Text
    details: Details = msgspec.field(default_factory=dict)


class HostWeightsError(Exception):
    """The one exception of the library; ``failure`` says what happened."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure

    @property
    def code(self) -> Code:
        """The failure's stable code."""
        return self.failure.code


def error(stage: Stage, code: Code, text: str, *, retryable: bool = False, **details: object) -> HostWeightsError:
    """Build the exception for a failure; ``details`` values are turned into text."""
    facts = {name: printable(str(value))[:4096] for name, value in details.items()}
    return HostWeightsError(
        Failure(stage=stage, code=code, retryable=retryable, text=printable(text)[:16_384], details=facts)
    )


def printable(text: str) -> str:
    """The text with what no encoding can hold (bytes of a path that are not Unicode) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def visible(text: str) -> str:
    """The text with escapes for what a terminal would obey or not show; names that others wrote may hold it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
