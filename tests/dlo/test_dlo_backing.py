"""A model's blocks found in an artifact's manifest, and what the backings give."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from dlo_support import FileLease, ProbeDevice, Stack, discover, run
from hostweights.dlo import BlockMap, LeaseBacking, LeasedBlock, PrivateBacking, Streamer, leased_blocks
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.identity import (
    ArtifactIdentity,
    ComponentIdentity,
    LayoutIdentity,
    ProducerIdentity,
    RepresentationIdentity,
    SourceIdentity,
)
from hostweights.messages.manifest import AliasEntry, BlockEntry, FileEntry, Manifest, TensorEntry, TensorKind

DIGEST = "0" * 64


def manifest_of(lease: FileLease, found: BlockMap) -> Manifest:
    """The manifest of an artifact whose blocks stand in reverse order, after a page of something else."""
    tensors: list[TensorEntry] = []
    blocks: list[BlockEntry] = []
    offset = 4096
    for number, leased in enumerate(reversed(lease.blocks)):
        blocks.append(
            BlockEntry(name=leased.plan.name, file="a.safetensors", offset=offset, size_bytes=leased.plan.size_bytes)
        )
        tensors += [
            TensorEntry(
                name=planned.name,
                kind=TensorKind.PARAMETER,
                role="weight",
                file="a.safetensors",
                offset=offset + planned.offset,
                size_bytes=planned.size_bytes,
                shape=planned.shape,
                dtype=planned.dtype,
                stride=planned.stride,
                digest=DIGEST,
                block=number,
            )
            for planned in leased.plan.tensors
        ]
        offset += -(-leased.plan.size_bytes // 4096) * 4096
    assert len(blocks) == len(found.blocks)
    identity = ArtifactIdentity(
        source=SourceIdentity(model="m", content=DIGEST),
        component=ComponentIdentity(name="c", ownership=DIGEST),
        representation=RepresentationIdentity(name="r", dtype="mixed"),
        layout=LayoutIdentity(name="l"),
        producer=ProducerIdentity(name="p", version=1, implementation="i"),
        manifest_schema=1,
        restorer_schema=1,
    )
    return Manifest(
        key=DIGEST,
        identity=identity,
        content=DIGEST,
        tensors=tuple(tensors),
        blocks=tuple(blocks),
        files=(FileEntry(name="a.safetensors", size_bytes=offset, data_offset=4096, digest=DIGEST),),
    )


@pytest.fixture
def model() -> Stack:
    return Stack([4, 9, 5])


@pytest.fixture
def lease(model: Stack, tmp_path: Path) -> FileLease:
    return FileLease(tmp_path / "weights", model, discover(model))


def mirrored(leased: Sequence[LeasedBlock]) -> list[LeasedBlock]:
    """The lease writes its extents in definition order, the manifest names them in reverse."""
    last = len(leased) - 1
    return [
        LeasedBlock(
            plan=block.plan,
            extent=None if block.extent is None else last - block.extent,
            file=block.file,
            stored=block.stored,
        )
        for block in leased
    ]


def test_C2_the_blocks_of_a_model_are_found_in_a_manifest(model: Stack, lease: FileLease) -> None:
    found = discover(model)
    leased = leased_blocks(found, manifest_of(lease, found), str(lease.path.parent))
    assert [block.extent for block in leased] == [2, 1, 0]
    for block, written, wanted in zip(leased, lease.blocks, found.blocks, strict=True):
        assert block.plan.size_bytes == written.plan.size_bytes
        assert tuple(tensor.name for tensor in block.plan.tensors) == wanted.parameters
        offsets = {tensor.name: tensor.offset for tensor in written.plan.tensors}
        assert {tensor.name: tensor.offset for tensor in block.plan.tensors} == offsets


@pytest.mark.parametrize("direct", [True, False])
def test_C2_a_model_streams_from_blocks_found_in_a_manifest(
    model: Stack, lease: FileLease, device: ProbeDevice, direct: bool
) -> None:
    found = discover(model)
    expected = run(model)
    leased = mirrored(leased_blocks(found, manifest_of(lease, found), str(lease.path.parent)))
    backing = LeaseBacking(lease, leased, direct=direct, release=lambda: None)
    streamer = Streamer.attach(model, found, device, backing)
    assert streamer.sizes.direct is direct
    for _ in range(2):
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_T63_an_alias_is_stored_once_and_a_tensor_outside_its_block_stays_resident(
    model: Stack, lease: FileLease, device: ProbeDevice
) -> None:
    found = discover(model)
    manifest = manifest_of(lease, found)
    name = "blocks.1.up.weight"
    moved = tuple(
        replace(entry, name="shared", block=None) if entry.name == name else entry for entry in manifest.tensors
    )
    manifest = replace(manifest, tensors=moved, aliases=(AliasEntry(name=name, target="shared"),))
    leased = leased_blocks(found, manifest, str(lease.path.parent))
    assert name not in [tensor.name for tensor in leased[1].plan.tensors]
    expected = run(model)
    home = model.get_parameter(name).data_ptr()
    backing = LeaseBacking(lease, mirrored(leased), direct=True, release=lambda: None)
    streamer = Streamer.attach(model, found, device, backing)
    assert torch.equal(run(model), expected)
    assert model.get_parameter(name).data_ptr() == home
    streamer.detach(terminal=False)


def test_C2_an_artifact_that_does_not_cover_the_model_is_refused(model: Stack, lease: FileLease) -> None:
    found = discover(model)
    manifest = manifest_of(lease, found)
    with pytest.raises(HostWeightsError) as refused:
        leased_blocks(found, replace(manifest, tensors=manifest.tensors[1:]), str(lease.path.parent))
    assert refused.value.code is Code.COVERAGE_INCOMPLETE


def test_C2_blocks_that_an_artifact_stores_outside_extents_are_packed(
    model: Stack, lease: FileLease, device: ProbeDevice
) -> None:
    found = discover(model)
    manifest = manifest_of(lease, found)
    manifest = replace(manifest, tensors=tuple(replace(entry, block=None) for entry in manifest.tensors))
    expected = run(model)
    leased = leased_blocks(found, manifest, str(lease.path.parent))
    assert [block.extent for block in leased] == [None, None, None]
    backing = LeaseBacking(lease, leased, direct=False, release=lambda: None)
    streamer = Streamer.attach(model, found, device, backing)
    for _ in range(2):
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_T52_a_lease_is_released_once_and_after_its_views_are_dropped(lease: FileLease) -> None:
    backing = lease.backing(direct=True)
    extent = backing.extent(0)
    assert extent is not None
    target = torch.zeros_like(extent)
    backing.pack(0, target)
    assert torch.equal(target, extent)
    backing.close()
    backing.close()
    assert lease.released == 1
    assert backing.extent(0) is None


def test_private_tensors_must_be_on_the_host() -> None:
    model = Stack([4]).to("meta")
    with pytest.raises(HostWeightsError, match="is on meta; blocks are streamed from host memory") as refused:
        PrivateBacking(model, discover(model))
    assert refused.value.code is Code.UNSUPPORTED
