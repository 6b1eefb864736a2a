"""E4: log records as lines of JSON."""

import json
import logging
import re
from pathlib import Path

import pytest

from hostweights import Code, Stage
from hostweights.messages.failure import error
from hostweights.observe import JsonFormatter


def formatted(message: str, *arguments: object, raised: BaseException | None = None, **extra: object) -> str:
    exc_info = None if raised is None else (type(raised), raised, None)
    logger = logging.Logger("hostweights")
    record = logger.makeRecord(
        "hostweights", logging.WARNING, __file__, 1, message, arguments, exc_info, extra=extra or None
    )
    return JsonFormatter(service="embed").format(record)


def test_E4_log_lines_are_one_json_object_each() -> None:
    line = formatted("lost %d of\n%s", 3, "x", lease="lease-1", path=Path("/a"))

    found = json.loads(line)
    assert "\n" not in line
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {
        "level": "warning",
        "logger": "hostweights",
        "message": "lost 3 of\nx",
        "service": "embed",
        "lease": "lease-1",
        "path": "/a",
    }


def test_E4_a_failure_is_logged_with_its_code_and_details() -> None:
    found = json.loads(formatted("no", raised=error(Stage.LOOKUP, Code.BUILD_BUSY, "busy", key="k")))

    assert (found["failure"]["code"], found["failure"]["details"]) == ("build_busy", {"key": "k"})
    assert "busy" in found["exception"]


@pytest.mark.parametrize("value", ["\udcff", float("nan"), {1: object()}, {("a", 1): 2}, b"\xff", 1 << 80, [set()]])
def test_E4_whatever_is_logged_makes_a_line(value: object) -> None:
    assert isinstance(json.loads(formatted("odd", value=value)), dict)
