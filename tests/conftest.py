"""For every test: blocking-call detection, and a runtime directory that no other process of the machine uses."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

import loop_guard
import store_kit


def pytest_configure(config: pytest.Config) -> None:
    loop_guard.install()
    place = tempfile.mkdtemp(prefix="hostweights-run-")  # short, as the name of a socket must be; mode 0700
    os.environ["HOSTWEIGHTS_RUNTIME_DIR"] = place
    config.add_cleanup(lambda: shutil.rmtree(place, ignore_errors=True))


@pytest.fixture(autouse=True)
def _no_blocking_call_on_a_loop() -> Iterator[None]:
    loop_guard.found.clear()
    loop_guard.watching = True
    yield
    loop_guard.watching = False
    assert not loop_guard.found, "the library blocked a running loop:\n" + "\n".join(loop_guard.found)


@pytest.fixture(autouse=True)
def _stores_are_closed() -> Iterator[None]:
    """A store that a test leaves open holds four descriptors: with thousands of tests, more than a process may have."""
    before = len(store_kit.OPENED)
    yield
    while len(store_kit.OPENED) > before:
        store_kit.OPENED.pop().close()
