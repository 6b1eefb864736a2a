"""A6: loading, publishing, streaming and unloading put no key into the interpreter's table of interned strings."""

from pathlib import Path

import pytest

from hostweights import Config, HostWeights
from interned import interned_digests
from tiny_model import factory, make_checkpoint


@pytest.mark.asyncio
async def test_A6_no_key_is_interned_by_loads_cold_warm_and_streamed(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    with interned_digests() as found:
        async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
            for warm in (False, True):
                model = await host.load(factory(), source)
                assert model.warm == warm
                if model.publication is not None:
                    assert (await model.publication.wait()).failure is None
                await host.attach(model)
                await model.unload()
    assert found == []
