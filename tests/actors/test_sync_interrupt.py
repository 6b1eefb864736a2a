"""D2: an interrupt while the sync facade loads leaves no model and no lease."""

import signal
import threading
from pathlib import Path

import pytest
import torch

from hostweights import Config, open_sync
from tiny_model import Tiny, factory, make_checkpoint, plain, run


def test_D2_an_interrupted_load_leaves_nothing_that_nobody_holds(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)

    def interrupted_factory() -> Tiny:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return Tiny()

    with open_sync(Config(root=str(tmp_path / "store"))) as host:
        host.adopt(host.load(factory(), source))
        leases = host.leases()
        models = host._host._assembly.resources.models
        known = models.ids()
        with pytest.raises(KeyboardInterrupt):
            host.load(interrupted_factory, source)
        assert models.ids() == known
        assert host.leases() == leases
        assert torch.equal(run(host.load(factory(), source).module), plain(source))
