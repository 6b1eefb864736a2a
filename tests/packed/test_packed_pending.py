"""Parameters of a packed artifact wait until they are looked at, and a streamed model never unpacks them."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from hostweights import HostWeights, HostWeightsError, open_sync
from hostweights.actors.assembly import TRANSPORT
from hostweights.actors.ports import packed  # noqa: F401  # its decoder for devices, before it is counted
from hostweights.dlo.devices.cpu import CpuDevice
from hostweights.hwr.packed.codec import corrupt, unpack
from hostweights.hwr.packed.pending import KeptPacked, PendingParameter
from hostweights.messages.transport import Rebase
from packed_model import Packable, forward, make_packable, packing_config

VALUES = torch.arange(16, dtype=torch.bfloat16).view(4, 4)


def pending(calls: list[int] | None = None) -> PendingParameter:
    def unpack() -> torch.Tensor:
        if calls is not None:
            calls.append(1)
        return VALUES.clone()

    return PendingParameter.waiting(torch.full((4, 4), torch.nan, dtype=torch.bfloat16), unpack)


USES: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "address": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "repr": repr,
    "list": lambda p: p.tolist(),
    "deepcopy": copy.deepcopy,
    "operator": lambda p: p + 1,
    "reflected": lambda p: 1 + p,
    "compared": lambda p: p == p,
    "in a list": lambda p: torch.cat([p, p]),
    "in a keyword": lambda p: torch.stack(tensors=(p,)),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 4, dtype=torch.bfloat16), p),
    "array": lambda p: p.float().numpy(),
    "item": lambda p: p[1],
    "in place": lambda p: p.mul_(2),
    "moved": lambda p: p.to("cpu", copy=True),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("inference", [False, True])
def test_C12_whatever_reads_a_waiting_parameter_gets_its_values(use: str, inference: bool) -> None:
    calls: list[int] = []
    parameter = pending(calls)
    with torch.inference_mode(mode=inference):
        USES[use](parameter)
        USES[use](parameter)
    assert type(parameter) is nn.Parameter
    assert calls == [1]
    assert not parameter.isnan().any()


@pytest.mark.parametrize("inference", [False, True])
def test_C12_a_deep_copy_of_a_waiting_parameter_is_an_ordinary_one_with_its_values(inference: bool) -> None:
    calls: list[int] = []
    parameter = pending(calls)
    with torch.inference_mode(mode=inference):
        pair = copy.deepcopy([parameter, parameter])
    assert pair[0] is pair[1] is not parameter
    assert type(pair[0]) is nn.Parameter
    assert torch.equal(pair[0], VALUES)
    assert pair[0].data_ptr() != parameter.data_ptr()
    assert calls == [1]


def test_C12_a_deep_copy_of_a_packed_model_computes_before_and_after_it_streamed(tmp_path: Path) -> None:
    model, source = make_packable(tmp_path)
    expected = forward(model)
    with open_sync(packing_config(tmp_path / "store")) as host:
        host.unload(host.load(partial(Packable, 3), source))
        loaded = host.load(partial(Packable, 3), source)
        assert sum(type(p) is PendingParameter for p in loaded.module.parameters()) == 6
        assert torch.equal(forward(copy.deepcopy(loaded.module)), expected)
        host.unload(loaded)
        loaded = host.load(partial(Packable, 3), source)
        host.detach(host.attach(loaded, device="cpu"))
        assert sum(type(p) is PendingParameter for p in loaded.module.parameters()) == 6
        assert torch.equal(forward(copy.deepcopy(loaded.module)), expected)


def test_C12_asking_for_a_shape_unpacks_nothing() -> None:
    calls: list[int] = []
    parameter = pending(calls)
    asked = (parameter.shape, parameter.size(0), parameter.dtype, parameter.device, parameter.stride(), parameter.ndim)
    assert asked == (VALUES.shape, 4, VALUES.dtype, VALUES.device, VALUES.stride(), 2)
    assert (parameter.numel(), parameter.nbytes, len(parameter), parameter.is_meta) == (16, 32, 4, False)
    parameter.requires_grad_(False)
    assert isinstance(parameter, nn.Parameter)
    assert not calls


def test_C12_a_parameter_that_cannot_be_unpacked_says_so_each_time_and_goes_on_waiting() -> None:
    def damaged() -> torch.Tensor:
        raise corrupt("its table does not ascend")

    parameter = PendingParameter.waiting(torch.full((4, 4), torch.nan), damaged)
    for _ in range(2):
        with pytest.raises(HostWeightsError, match="damaged"):
            parameter.sum()
    assert type(parameter) is PendingParameter


def test_C12_threads_that_look_at_once_unpack_once() -> None:
    calls: list[int] = []
    parameter = pending(calls)
    together = threading.Barrier(4)
    seen: list[torch.Tensor] = []

    def look() -> None:
        together.wait()
        seen.append(parameter.detach())

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert all(torch.equal(value, VALUES) for value in seen)


def test_C12_a_model_that_streams_is_never_unpacked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = make_packable(tmp_path)
    expected = forward(model)
    with open_sync(packing_config(tmp_path / "store")) as host:
        host.unload(host.load(partial(Packable, 3), source))
        unpacked = count_unpacking(monkeypatch)
        loaded = host.load(partial(Packable, 3), source)
        waiting = [p for p in loaded.module.parameters() if type(p) is PendingParameter]
        assert len(waiting) == 6
        attachment = host.attach(loaded, device="cpu")
        assert torch.equal(forward(loaded.module), expected)
        assert not unpacked
        assert all(type(p) is nn.Parameter for p in loaded.module.parameters())
        host.detach(attachment)
        assert not unpacked
        assert torch.equal(forward(loaded.module), expected)
        assert len(unpacked) == 6


def count_unpacking(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of whole tensors on the host: what a decoder does on a device's behalf goes another way."""
    unpacked: list[int] = []

    def counted(*args: object) -> None:
        unpacked.append(1)
        unpack(*args)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr("hostweights.hwr.packed.codec.unpack", counted)
    return unpacked


@pytest.mark.asyncio
async def test_C12_blocks_that_stay_resident_are_unpacked_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = make_packable(tmp_path)
    expected = forward(model)
    async with HostWeights(packing_config(tmp_path / "store")) as host:
        loaded = await host.load(partial(Packable, 3), source)
        unpacked = count_unpacking(monkeypatch)
        attachment = await host.attach(loaded, device="cpu", resident=1)
        assert len(unpacked) == 2
        assert torch.equal(forward(loaded.module), expected)
        await attachment.detach()
        for name, value in loaded.module.named_parameters():
            assert torch.equal(value, model.get_parameter(name)), name


def test_C12_after_an_attach_that_failed_parameters_wait_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = make_packable(tmp_path)
    with open_sync(packing_config(tmp_path / "store")) as host:
        loaded = host.load(partial(Packable, 3), source)
        with monkeypatch.context() as broken:
            broken.setattr(CpuDevice, "allocate", lambda *_: (_ for _ in ()).throw(MemoryError("no slot")))
            with pytest.raises(HostWeightsError):
                host.attach(loaded, device="cpu")
        assert sum(type(p) is PendingParameter for p in loaded.module.parameters()) == 6
        for name, value in loaded.module.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.asyncio
async def test_C12_an_attach_that_failed_is_undone_before_a_forward_that_waits_for_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = make_packable(tmp_path)
    inside: list[bool] = []
    undo = KeptPacked.undo
    async with HostWeights(packing_config(tmp_path / "store")) as host:
        loaded = await host.load(partial(Packable, 3), source)
        (entry,) = host._assembly.resources.models.all()

        def undone(kept: KeptPacked) -> None:
            inside.append(entry.need_gate()._writer == threading.get_ident())
            undo(kept)

        monkeypatch.setattr(KeptPacked, "undo", undone)
        with pytest.raises(HostWeightsError):
            await host.attach(loaded, on_demand=("nothing of that name",))
    assert inside == [True]


@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [False, True])
async def test_C12_a_model_whose_parameters_wait_can_be_adopted(tmp_path: Path, *, streamed: bool) -> None:
    model, source = make_packable(tmp_path)
    async with HostWeights(packing_config(tmp_path / "store")) as host:
        loaded = await host.load(partial(Packable, 3), source)
        if streamed:
            await (await host.attach(loaded)).detach()
        assert (await host.adopt(loaded)).adopted
        assert torch.equal(forward(loaded.module), forward(model))


@pytest.mark.asyncio
async def test_C12_a_model_that_was_detached_between_its_publication_and_its_adoption_moves(tmp_path: Path) -> None:
    model, source = make_packable(tmp_path)
    async with HostWeights(packing_config(tmp_path / "store")) as host:
        loaded = await host.load(partial(Packable, 3), source)
        await (await host.attach(loaded)).detach()
        await host._assembly.ask(TRANSPORT, Rebase(model_id=loaded.model_id, lease_id=loaded.lease_id))
        assert torch.equal(forward(loaded.module), forward(model))


def test_C12_a_waiting_parameter_outlives_its_host(tmp_path: Path) -> None:
    model, source = make_packable(tmp_path)
    with open_sync(packing_config(tmp_path / "store")) as host:
        module = host.load(partial(Packable, 3), source).module
    assert torch.equal(forward(module), forward(model))
