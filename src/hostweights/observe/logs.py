"""Log records as lines of JSON, for the standard library's logging."""

import logging
import time
from typing import Final

import msgspec

from hostweights.messages.failure import HostWeightsError

_STANDARD: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message; then ``fields``, then what ``extra`` gave.

    A HostWeightsError becomes its stage, code and details. A value that JSON cannot hold is written as its text, so
    that a line never fails. Names that ``extra`` takes from the record's own cannot occur: logging refuses them.
    """

    def __init__(self, **fields: str) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        milliseconds = int(record.msecs)
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info is not None and record.exc_info[1] is not None:
            raised = record.exc_info[1]
            if isinstance(raised, HostWeightsError):
                line["failure"] = raised.failure
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError):
            plain = {name: str(value).encode("utf-8", "backslashreplace").decode() for name, value in line.items()}
            return msgspec.json.encode(plain).decode()
