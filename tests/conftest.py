"""Blocking-call detection for every test."""

from collections.abc import Iterator

import pytest

import loop_guard


def pytest_configure() -> None:
    loop_guard.install()


@pytest.fixture(autouse=True)
def _no_blocking_call_on_a_loop() -> Iterator[None]:
    loop_guard.found.clear()
    loop_guard.watching = True
    yield
    loop_guard.watching = False
    assert not loop_guard.found, "the library blocked a running loop:\n" + "\n".join(loop_guard.found)
