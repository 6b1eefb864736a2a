"""Every asynchronous test of the runtime runs on each loop that it promises to work on."""

from collections.abc import Mapping

import pytest

from loops import LOOPS, LoopFactory


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:  # noqa: ARG001 - the hook's signature
    return LOOPS
