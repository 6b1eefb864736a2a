"""Packed artifacts through the public API: published, loaded, streamed, adopted, detached, equal to the bit."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hostweights import HostWeights, HostWeightsError, Mode, open_sync, warm
from hostweights.dlo import Streamer
from hostweights.dlo.devices.cpu import CpuStream
from hostweights.dlo.packed.decoders import HostDecoder
from hostweights.dlo.packed.pace import Pace
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.config import PackingPolicy
from hostweights.messages.failure import Code, Stage, error
from hostweights.messages.report import PublicationOutcome
from hostweights.messages.transport import Backing, BackingChoice
from packed_model import WIDTH, Packable, forward, make_packable, packing_config
from store_kit import open_store
from tiny_model import factory, make_checkpoint


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("blocks", [2, 5])
def test_C12_packed_blocks_stream_to_the_bit(tmp_path: Path, blocks: int, slots: int) -> None:
    model, source = make_packable(tmp_path, blocks)
    expected = forward(model)
    with open_sync(packing_config(tmp_path / "store")) as host:
        loaded = host.load(partial(Packable, blocks), source)
        assert torch.equal(forward(loaded.module), expected)
        attachment = host.attach(loaded, device="cpu", slots=slots)
        assert attachment.info.backing is Backing.PACKED
        for _ in range(4):
            assert torch.equal(forward(loaded.module), expected)
        packing = host.ring(attachment).packing
        assert packing is not None
        assert packing.plain_bytes / packing.packed_bytes > 1.25
        assert packing.copied_bytes >= packing.packed_bytes
        assert packing.reason
        host.detach(attachment)
        assert torch.equal(forward(loaded.module), expected)


def test_C12_between_uses_a_packed_parameter_is_nan_and_a_state_dict_is_right(tmp_path: Path) -> None:
    model, source = make_packable(tmp_path)
    with open_sync(packing_config(tmp_path / "store")) as host:
        loaded = host.load(partial(Packable, 3), source)
        attachment = host.attach(loaded, device="cpu")
        forward(loaded.module)
        for name, value in loaded.module.get_submodule("layers").named_parameters():
            stored = model.get_parameter(f"layers.{name}")
            assert value.isnan().all() if value.numel() > 1000 else torch.equal(value, stored), name
        for part, prefix in ((loaded.module, ""), (loaded.module.get_submodule("layers.1"), "layers.1.")):
            for name, value in part.state_dict().items():
                assert torch.equal(value, model.state_dict()[prefix + name]), name
        host.detach(attachment)
        for name, value in loaded.module.named_parameters():
            assert torch.equal(value, model.get_parameter(name)), name


def test_C12_a_block_reads_right_in_a_state_dict_taken_while_it_is_used(tmp_path: Path) -> None:
    model, source = make_packable(tmp_path)
    seen: dict[str, torch.Tensor] = {}
    with open_sync(packing_config(tmp_path / "store")) as host:
        loaded = host.load(partial(Packable, 3), source)
        inside = loaded.module.get_submodule("layers.1.norm")
        inside.register_forward_hook(lambda *_: seen.update(loaded.module.state_dict()))
        host.attach(loaded, device="cpu")
        forward(loaded.module)
    assert seen
    for name, value in seen.items():
        assert torch.equal(value, model.state_dict()[name]), name


def split(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
    """A state dict hook that stores a fused weight as its parts, and as another dtype's."""
    del module, metadata
    weight = state.pop(f"{prefix}weight")
    state[f"{prefix}first"], state[f"{prefix}last"], state[f"{prefix}columns"] = weight[:1], weight[1:], weight.t()[3:]
    state[f"{prefix}bits"] = weight.view(torch.int16)[2:]


@pytest.mark.parametrize("used", [False, True])
def test_C12_a_state_dict_hook_that_slices_gets_slices_of_the_values(tmp_path: Path, used: bool) -> None:
    model, source = make_packable(tmp_path)
    seen: list[dict[str, torch.Tensor]] = []
    with open_sync(packing_config(tmp_path / "store")) as host:
        loaded = host.load(partial(Packable, 3), source)
        for each in (model, loaded.module):
            for index in range(3):
                linear = each.get_submodule(f"layers.{index}.linear")
                linear.register_state_dict_post_hook(split)  # type: ignore[no-untyped-call]  # torch's
        host.attach(loaded, device="cpu")
        if used:
            norm = loaded.module.get_submodule("layers.1.norm")
            norm.register_forward_hook(lambda *_: seen.append(loaded.module.state_dict()))
        forward(loaded.module)
        seen.append(loaded.module.state_dict())
    assert len(seen) == 1 + used
    for state in seen:
        assert list(state) == list(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(state[name], value), name


class Expired(PlainBudget):
    """Nothing may wait."""

    def check(self) -> None:
        raise error(Stage.TRANSPORT, Code.DEADLINE_EXCEEDED, "no time is left")


def test_C9_a_packed_block_that_is_called_while_a_detach_waits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = make_packable(tmp_path)
    expected = forward(model)
    made: list[Streamer] = []
    attach = Streamer.attach

    def remembered(*args: Any, **named: Any) -> Streamer:
        made.append(attach(*args, **named))
        return made[-1]

    monkeypatch.setattr(Streamer, "attach", remembered)
    with open_sync(packing_config(tmp_path / "store")) as host:
        loaded = host.load(partial(Packable, 3), source)
        attachment = host.attach(loaded, device="cpu")
        inside, leave = threading.Event(), threading.Event()

        def stay(*_: object) -> None:
            inside.set()
            leave.wait()

        hook = loaded.module.get_submodule("layers.0.norm").register_forward_hook(stay)
        caller = threading.Thread(target=loaded.module.get_submodule("layers.0"), args=(torch.zeros(1, WIDTH),))
        caller.start()
        inside.wait()
        hook.remove()
        try:
            with pytest.raises(HostWeightsError) as waited:
                made[0].detach(terminal=False, budget=Expired())
            assert waited.value.code is Code.DEADLINE_EXCEEDED
            with pytest.raises(HostWeightsError, match="while its model is being detached") as refused:
                forward(loaded.module)
            assert (refused.value.code, refused.value.failure.retryable) == (Code.NOT_ATTACHED, True)
        finally:
            leave.set()
            caller.join()
        host.detach(attachment)
        assert torch.equal(forward(loaded.module), expected)


@pytest.mark.asyncio
async def test_C12_a_cold_model_adopts_its_packed_artifact_while_it_streams(tmp_path: Path) -> None:
    model, source = make_packable(tmp_path)
    expected = forward(model)
    async with HostWeights(packing_config(tmp_path / "store", build=False, adopt=False)) as host:
        loaded = await host.load(partial(Packable, 3), source)
        attachment = await host.attach(loaded, device="cpu")
        assert attachment.info.backing is Backing.STAGED
        assert torch.equal(forward(loaded.module), expected)
        report = await host.adopt(loaded)
        assert report.failure is None
        for _ in range(3):
            assert torch.equal(forward(loaded.module), expected)
        assert (await attachment.stats()).packing is not None
        await attachment.detach()
        assert torch.equal(forward(loaded.module), expected)


@pytest.mark.asyncio
async def test_C12_a_streamed_packed_model_is_published_anew_with_its_values_and_moves_there(tmp_path: Path) -> None:
    model, source = make_packable(tmp_path)
    expected = forward(model)
    async with HostWeights(packing_config(tmp_path / "store")) as host:
        loaded = await host.load(partial(Packable, 3), source)
        attachment = await host.attach(loaded, device="cpu")
        assert torch.equal(forward(loaded.module), expected)
        (lease,) = await host.leases()
        store = open_store(tmp_path / "store")
        store.condemn(lease.key, lease.generation, Code.IO_ERROR, "so that another is published")
        report = await host.publish(loaded, adopt=True).wait()
        assert (report.failure, report.outcome, report.adopted) == (None, PublicationOutcome.PUBLISHED, True)
        assert [lease.generation for lease in await host.leases()] == ["00000002"]
        for _ in range(3):
            assert torch.equal(forward(loaded.module), expected)
        again = await host.load(partial(Packable, 3), source)
        for name, value in again.module.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
        await attachment.detach()
        assert torch.equal(forward(loaded.module), expected)


@pytest.mark.asyncio
@pytest.mark.parametrize("choice", list(BackingChoice))
async def test_C12_every_backing_choice_streams_a_packed_artifact(tmp_path: Path, choice: BackingChoice) -> None:
    model, source = make_packable(tmp_path)
    async with HostWeights(packing_config(tmp_path / "store")) as host:
        loaded = await host.load(partial(Packable, 3), source)
        attachment = await host.attach(loaded, device="cpu", backing=choice)
        staged = choice is BackingChoice.STAGED
        assert attachment.info.backing is (Backing.STAGED if staged else Backing.PACKED)
        assert torch.equal(forward(loaded.module), forward(model))
        assert ((await attachment.stats()).packing is None) is staged


@pytest.mark.asyncio
async def test_C12_resident_packed_blocks_are_unpacked_once(tmp_path: Path) -> None:
    model, source = make_packable(tmp_path)
    async with HostWeights(packing_config(tmp_path / "store")) as host:
        loaded = await host.load(partial(Packable, 3), source)
        attachment = await host.attach(loaded, device="cpu", resident=1)
        kept = loaded.module.get_parameter("layers.0.linear.weight")
        for _ in range(3):
            assert torch.equal(forward(loaded.module), forward(model))
        assert torch.equal(kept, model.get_parameter("layers.0.linear.weight"))
        assert (await attachment.stats()).copies <= 3 * 2 + 1


def fill(memory: torch.Tensor) -> None:
    memory.fill_(0xFF)


def refuse() -> None:
    raise OSError("the device said no")


@pytest.mark.parametrize("where", ["copy", "unpack"])
def test_C12_a_failed_copy_or_unpacking_fails_its_block_and_the_next_forward_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model, source = make_packable(tmp_path, 4)
    expected = forward(model)
    failures = [where]
    copy, unpack = CpuStream.copy, HostDecoder.unpack

    def failing_copy(self: CpuStream, target: torch.Tensor, source: torch.Tensor) -> None:
        if failures == ["copy"]:
            failures.pop()
            self.run(refuse)
        copy(self, target, source)

    def failing_unpack(self: HostDecoder, block: int, packed: torch.Tensor, slot: torch.Tensor) -> None:
        if failures == ["unpack"]:
            failures.pop()
            self.stream.run(refuse)
        unpack(self, block, packed, slot)

    with open_sync(packing_config(tmp_path / "store")) as host:
        loaded = host.load(partial(Packable, 4), source)
        monkeypatch.setattr(CpuStream, "copy", failing_copy)
        monkeypatch.setattr(HostDecoder, "unpack", failing_unpack)
        host.attach(loaded, device="cpu")
        with pytest.raises(HostWeightsError) as failed:
            forward(loaded.module)
        assert failed.value.code is Code.COPY_FAILED
        assert "the device said no" in failed.value.failure.text
        for _ in range(3):
            assert torch.equal(forward(loaded.module), expected)


def test_C12_a_wrong_guess_whose_unpacking_failed_fails_no_other_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = make_packable(tmp_path, 6)
    unpack = HostDecoder.unpack

    def failing_unpack(self: HostDecoder, block: int, packed: torch.Tensor, slot: torch.Tensor) -> None:
        if block == 3:
            self.stream.run(refuse)
        unpack(self, block, packed, slot)

    x = torch.linspace(-1.0, 1.0, WIDTH).reshape(1, WIDTH)
    order = [0, 1, 2, 0, 1, 5, 4, 0, 1, 2]  # after the first 2 block 3 is guessed, in vain
    with open_sync(packing_config(tmp_path / "store")) as host, torch.inference_mode():
        loaded = host.load(partial(Packable, 6), source)
        layers = [loaded.module.get_submodule(f"layers.{index}") for index in range(6)]
        expected = [layer(x) for layer in layers]
        host.attach(loaded, device="cpu", slots=2)
        forward(loaded.module)
        monkeypatch.setattr(HostDecoder, "unpack", failing_unpack)
        for index in order:
            assert torch.equal(layers[index](x), expected[index])


def test_C12_no_staging_slot_is_refilled_before_it_was_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slot is poisoned before it is unpacked into, and every staging slot behind its unpacking.

    The first unpacking gives a third copy, which must wait for it, time to come too early.
    """
    model, source = make_packable(tmp_path, 5)
    expected = forward(model)
    copy, unpack = CpuStream.copy, HostDecoder.unpack
    third = threading.Event()
    copies: list[int] = []

    def watched(self: CpuStream, target: torch.Tensor, source: torch.Tensor) -> None:
        copy(self, target, source)
        copies.append(source.numel())
        if len(copies) == 3:
            self.run(third.set)

    def early() -> None:
        third.wait(0.5)

    def poisoned(self: HostDecoder, block: int, packed: torch.Tensor, slot: torch.Tensor) -> None:
        self.stream.run(early)
        self.stream.run(partial(fill, slot))
        unpack(self, block, packed, slot)
        self.stream.run(partial(fill, packed))

    monkeypatch.setattr(HostDecoder, "unpack", poisoned)
    monkeypatch.setattr(CpuStream, "copy", watched)
    with open_sync(packing_config(tmp_path / "store")) as host:
        loaded = host.load(partial(Packable, 5), source)
        host.attach(loaded, device="cpu", slots=4)
        for _ in range(40):
            assert torch.equal(forward(loaded.module), expected)


def test_C12_packed_and_plain_artifacts_lie_side_by_side_under_keys_of_their_own(tmp_path: Path) -> None:
    _, source = make_packable(tmp_path)
    root = tmp_path / "store"
    packed = warm(packing_config(root), partial(Packable, 3), source)
    plain = warm(packing_config(root, PackingPolicy.OFF), partial(Packable, 3), source)
    again = warm(packing_config(root, PackingPolicy.AUTO), partial(Packable, 3), source)
    assert packed.key == again.key != plain.key
    assert not again.built
    assert packed.size_bytes < 0.85 * plain.size_bytes
    assert packed.tensors == plain.tensors
    with open_sync(packing_config(root, PackingPolicy.OFF, build=False, mode=Mode.REQUIRED)) as host:
        attachment = host.attach(host.load(partial(Packable, 3), source), device="cpu")
        assert attachment.info.backing is Backing.DIRECT


def test_C12_auto_packs_nothing_for_a_model_of_another_dtype(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    keys = {
        warm(packing_config(tmp_path / "store", policy), factory(), checkpoint).key
        for policy in (PackingPolicy.AUTO, PackingPolicy.OFF)
    }
    assert len(keys) == 1


def test_C12_what_a_forward_waits_for_is_told_from_how_long_packed_bytes_wait_for_a_slot() -> None:
    pace = Pace()
    assert pace.info(packed_bytes=2, plain_bytes=3, copied_bytes=0).bound == "unknown"
    for slack_s, bound, reason in ((0.0, "copy", "saves 2.50 ms"), (5e-3, "compute", "for 0.20 ms")):
        for _ in range(16):
            pace.add(copy_s=5e-3, slack_s=slack_s, unpack_s=2e-4)
        info = pace.info(packed_bytes=2, plain_bytes=3, copied_bytes=0)
        assert info.bound == bound
        assert reason in info.reason
