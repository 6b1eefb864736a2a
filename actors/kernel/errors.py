"""How an ask can end other than with its reply or the handler's own failure.

Each is a ``HostWeightsError`` with its own code, so it crosses a journal or a process as its ``Failure`` and
``from_failure`` turns it back into the same class.
"""

from typing import Literal, Self

from ...messages.failure import Code, Failure, HostWeightsError, Stage, error

Phase = Literal["queued", "running"]


def _failure(code: Code, text: str, *, retryable: bool, **details: object) -> Failure:
    return error(Stage.RUNTIME, code, text, retryable=retryable, **details).failure


class DeadlineExceeded(HostWeightsError):  # noqa: N818 - it names what happened, as its code does
    """The ask's deadline passed, or could not be met: before its handler started or while that ran."""

    @classmethod
    def of(cls, actor: str, message: str, phase: Phase) -> Self:
        """The error for a message to an actor."""
        text = f"{message} to actor {actor!r} met its deadline while {phase}; allow it more time"
        return cls(_failure(Code.DEADLINE_EXCEEDED, text, retryable=True, actor=actor, phase=phase))

    @property
    def phase(self) -> Phase:
        """``queued``: the handler never started. ``running``: it was withdrawn and has ended."""
        return "running" if self.failure.details.get("phase") == "running" else "queued"


class ActorStopped(HostWeightsError):  # noqa: N818 - it names what happened, as its code does
    """The actor does not exist, does not run any more, or stopped before it could answer."""

    @classmethod
    def of(cls, actor: str, message: str, why: str) -> Self:
        """The error for a message that gets no answer."""
        text = f"{message} to actor {actor!r} was not answered: {why}"
        return cls(_failure(Code.ACTOR_STOPPED, text, retryable=False, actor=actor))


class MailboxFull(HostWeightsError):  # noqa: N818 - it names what happened, as its code does
    """The actor's mailbox holds as many messages as it may."""

    @classmethod
    def of(cls, actor: str, message: str, limit: int) -> Self:
        """The error for a message that found no room."""
        text = f"{message} found {limit} messages queued for actor {actor!r}, its limit; send again later"
        return cls(_failure(Code.MAILBOX_FULL, text, retryable=True, actor=actor, limit=limit))


class Overloaded(HostWeightsError):  # noqa: N818 - it names what happened, as its code does
    """What is queued cannot be worked off within the ask's deadline, so it was refused at once."""

    @classmethod
    def of(cls, actor: str, message: str, expected_s: float, left_s: float) -> Self:
        """The error for a message that would be answered too late."""
        text = (
            f"{message} to actor {actor!r} has {left_s:.3f} s left and would need about {expected_s:.3f} s; "
            "send again later or allow it more time"
        )
        return cls(_failure(Code.OVERLOADED, text, retryable=True, actor=actor, expected_s=expected_s, left_s=left_s))


class AskCycle(HostWeightsError):  # noqa: N818 - it names what happened, as its code does
    """The ask would wait, through other actors, for its own asker."""

    @classmethod
    def of(cls, actor: str, message: str, chain: tuple[str, ...]) -> Self:
        """The error for an ask of ``actor`` by the last of ``chain``."""
        path = " -> ".join((*chain, actor))
        text = f"{message} would wait for itself: {path}; use tell, or give the answer without asking back"
        return cls(_failure(Code.ASK_CYCLE, text, retryable=False, actor=actor, chain=path))


class HandlerFailed(HostWeightsError):  # noqa: N818 - it names what happened, as its code does
    """The handler ended with an exception that is not an answer; the incarnation ends with it."""

    @classmethod
    def of(cls, actor: str, message: str, cause: BaseException) -> Self:
        """The error for a crash; the exception itself becomes the cause."""
        text = f"actor {actor!r} failed in {message}: {type(cause).__name__}: {cause}"
        failed = cls(_failure(Code.HANDLER_FAILED, text, retryable=False, actor=actor, exception=type(cause).__name__))
        failed.__cause__ = cause
        return failed


def refused(code: Code, text: str) -> HostWeightsError:
    """The error for a use of the runtime that its contract rules out."""
    return error(Stage.RUNTIME, code, text)


def as_failed(actor: str, message: str, raised: BaseException | None) -> HostWeightsError:
    """A handler's own HostWeightsError as it is, anything else as HandlerFailed."""
    if isinstance(raised, HostWeightsError):
        return raised
    return HandlerFailed.of(actor, message, raised or RuntimeError("unknown"))


_CLASSES: dict[Code, type[HostWeightsError]] = {
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.ACTOR_STOPPED: ActorStopped,
    Code.MAILBOX_FULL: MailboxFull,
    Code.OVERLOADED: Overloaded,
    Code.ASK_CYCLE: AskCycle,
    Code.HANDLER_FAILED: HandlerFailed,
}


def from_failure(failure: Failure) -> HostWeightsError:
    """The exception for a failure that travelled, of the class it was raised with."""
    return _CLASSES.get(failure.code, HostWeightsError)(failure)
