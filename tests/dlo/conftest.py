"""Fixtures of the transport's tests."""

from collections.abc import Iterator

import pytest

from cuda_fake import fake_device
from dlo_support import ProbeDevice, library_threads
from hostweights.dlo import open_device


@pytest.fixture(params=["cpu", "cuda-without-a-gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[ProbeDevice]:
    """A device that poisons slots and can be held; no thread of it may outlive the test."""
    probe = ProbeDevice(open_device("cpu") if request.param == "cpu" else fake_device())
    yield probe
    probe.close()
    assert not library_threads()
