"""The records of a message as tuples: what their classes encode to, without the price of an object."""

from collections.abc import Iterable, Iterator

from ...messages.base import MESSAGES_VERSION
from ...messages.envelope import Kind
from ...messages.journal import Dequeued, Ended, Finished, Handled
from .delivery import Delivery

DEQUEUED = str(Dequeued.__struct_config__.tag)
FINISHED = str(Finished.__struct_config__.tag)
HANDLED = str(Handled.__struct_config__.tag)
_ASK, _TELL, _REPLIED = Kind.ASK.value, Kind.TELL.value, Ended.REPLIED.value


def dequeued(delivery: Delivery, start_s: float) -> tuple[object, ...]:
    """The record of a start; it takes the next position of the actor."""
    cell = delivery.cell
    position = cell.position
    cell.position = position + 1
    kind = _TELL if delivery.future is None else _ASK
    envelope = (
        MESSAGES_VERSION,
        delivery.id,
        kind,
        delivery.sender,
        cell.name,
        delivery.deadline_s,
        delivery.cause,
        delivery.trace,
        delivery.chain,
        None,
        delivery.message,
    )
    return (DEQUEUED, cell.name, cell.incarnation, position, start_s, envelope)


def split(records: Iterable[object]) -> Iterator[object]:
    """The same records with two for each ``handled``: half as long, and the first can be written without the second."""
    for record in records:
        match record:
            case (str(tag), name, incarnation, position, start_s, number, asked, *route, message, end_s, reply) if (
                tag == HANDLED
            ):
                sender, deadline_s, cause, trace, chain = route
                kind = _ASK if asked else _TELL
                envelope = (
                    MESSAGES_VERSION,
                    number,
                    kind,
                    sender,
                    name,
                    deadline_s,
                    cause,
                    trace,
                    chain,
                    None,
                    message,
                )
                yield (DEQUEUED, name, incarnation, position, start_s, envelope)
                yield (FINISHED, name, number, end_s, _REPLIED, reply, None)
            case _:
                yield record
