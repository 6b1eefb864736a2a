"""A GPU, and what a test must leave behind on it."""

from collections.abc import Iterator

import pytest

from dlo_support import library_threads
from gpu_support import open_cuda_device
from hostweights.dlo import CudaDevice
from hostweights.dlo.ledger import PROCESS_LEDGER


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    before, threads = PROCESS_LEDGER.registered_bytes, set(library_threads())  # of a test that failed before
    opened = open_cuda_device()
    yield opened
    opened.close()
    assert set(library_threads()) <= threads
    assert before == PROCESS_LEDGER.registered_bytes
