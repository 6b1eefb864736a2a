"""Fixtures of the transport's tests."""

from collections.abc import Iterator

import pytest

from dlo_support import ProbeDevice, library_threads
from hostweights.dlo import open_device


@pytest.fixture
def device() -> Iterator[ProbeDevice]:
    """A cpu device that poisons slots and can be held; no thread of it may outlive the test."""
    probe = ProbeDevice(open_device("cpu"))
    yield probe
    probe.close()
    assert not library_threads()
