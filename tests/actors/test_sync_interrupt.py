"""D2: an interrupt while the sync facade loads leaves no model and no lease; after its block every call is refused."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import BlockingPortal

from hostweights import Code, Config, HostWeightsError, open_sync
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


@pytest.mark.parametrize("handed_over", [True, False])
def test_D2_an_interrupt_while_a_load_is_handed_to_the_loop_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, handed_over: bool
) -> None:
    source = make_checkpoint(tmp_path)
    hand_over = BlockingPortal.start_task_soon
    torn: list[bool] = []

    def interrupted(portal: BlockingPortal, *args: Any, **named: Any) -> Any:
        if torn:
            return hand_over(portal, *args, **named)
        torn.append(True)
        if handed_over:
            hand_over(portal, *args, **named)
        raise KeyboardInterrupt

    with open_sync(Config(root=str(tmp_path / "store"))) as host:
        host.adopt(host.load(factory(), source))
        models = host._host._assembly.resources.models
        leases, known = host.leases(), models.ids()
        monkeypatch.setattr(BlockingPortal, "start_task_soon", interrupted)
        with pytest.raises(KeyboardInterrupt):
            host.load(factory(), source)
        assert (models.ids(), host.leases()) == (known, leases)


def test_D2_a_call_after_the_block_is_refused_by_name_and_the_model_computes_on(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    with open_sync(Config(root=str(tmp_path / "store"))) as host:
        model = host.load(factory(), source)
        attachment = host.attach(model)
        expected = run(model.module)
    calls: list[Callable[[], object]] = [
        lambda: host.load(factory(), source),
        lambda: host.adopt(model),
        lambda: host.attach(model),
        lambda: host.detach(attachment),
        lambda: host.record(attachment),
        lambda: host.ring(attachment),
        lambda: host.unload(model),
        host.leases,
        host.memory,
    ]
    for call in calls:
        with pytest.raises(HostWeightsError, match="open_sync block was left") as caught:
            call()
        assert caught.value.code is Code.ACTOR_STOPPED
    assert torch.equal(run(model.module), expected)
