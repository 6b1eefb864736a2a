"""Appendix: parallel coordinates in the identity."""

import msgspec
import pytest

from hostweights.hwr.identity import artifact_key, canonical, why
from hostweights.hwr.parallel import ParallelPlace, layout_identity
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.identity import ArtifactIdentity, LayoutIdentity
from store_kit import make_identity


def at(place: ParallelPlace) -> ArtifactIdentity:
    return msgspec.structs.replace(make_identity(), layout=layout_identity("blocks", place))


def key(place: ParallelPlace) -> str:
    return artifact_key(at(place))


ALONE = ParallelPlace()


def test_A3_a_single_worker_has_the_key_it_always_had() -> None:
    assert key(ALONE) == artifact_key(make_identity())
    assert b'"layout":{"name":"blocks","tp_rank":0,"tp_size":1}' in canonical(at(ALONE))


@pytest.mark.parametrize(
    "place",
    [
        ParallelPlace(dp_size=4, dp_rank=3),
        ParallelPlace(sp_size=4, sp_rank=2),
        ParallelPlace(sp_size=4, sp_rank=2, sp_backend="ulysses"),
        ParallelPlace(sp_changes_bytes=True),
    ],
)
def test_A3_coordinates_that_change_no_byte_share_one_artifact(place: ParallelPlace) -> None:
    assert key(place) == key(ALONE)


def test_A3_coordinates_that_change_bytes_have_keys_of_their_own() -> None:
    places = [
        ALONE,
        *(ParallelPlace(tp_size=2, tp_rank=rank) for rank in range(2)),
        *(ParallelPlace(pp_size=2, pp_stage=stage) for stage in range(2)),
        *(ParallelPlace(ep_size=2, ep_rank=rank) for rank in range(2)),
        ParallelPlace(sp_size=2, sp_backend="ring", sp_changes_bytes=True),
        ParallelPlace(sp_size=2, sp_backend="ulysses", sp_changes_bytes=True),
        ParallelPlace(sp_size=4, sp_backend="ring", sp_changes_bytes=True),
        ParallelPlace(tp_size=2, tp_rank=1, pp_size=2, pp_stage=1),
    ]
    assert len({key(place) for place in places}) == len(places)


def test_T35_peers_along_other_dimensions_share_the_artifact_of_their_tensor_parallel_rank() -> None:
    peers = [
        ParallelPlace(tp_size=2, tp_rank=1, dp_size=2, dp_rank=dp, sp_size=2, sp_rank=sp)
        for dp in range(2)
        for sp in range(2)
    ]
    assert len({key(peer) for peer in peers}) == 1


def test_A3_the_sequence_parallel_rank_never_names_an_artifact() -> None:
    places = [ParallelPlace(sp_size=2, sp_rank=r, sp_backend="ring", sp_changes_bytes=True) for r in range(2)]
    assert key(places[0]) == key(places[1])


@pytest.mark.parametrize(
    ("place", "code", "path"),
    [
        (ParallelPlace(cfg_size=2), Code.UNSUPPORTED, "cfg_size"),
        (ParallelPlace(hsdp_size=2), Code.UNSUPPORTED, "hsdp_size"),
        (ParallelPlace(tp_size=2, tp_rank=2), Code.INVALID_CONFIG, "tp_rank"),
        (ParallelPlace(dp_rank=-1), Code.INVALID_CONFIG, "dp_rank"),
        (ParallelPlace(pp_size=0), Code.INVALID_CONFIG, "pp_stage"),
        (ParallelPlace(sp_size=2, sp_changes_bytes=True), Code.INVALID_CONFIG, "sp_backend"),
    ],
)
def test_A3_what_is_not_defined_is_refused_and_never_guessed(place: ParallelPlace, code: Code, path: str) -> None:
    with pytest.raises(HostWeightsError) as caught:
        layout_identity("blocks", place)
    assert caught.value.code is code
    assert caught.value.failure.details["path"] == path


@pytest.mark.parametrize(
    ("layout", "path"),
    [
        (LayoutIdentity(name="x", pp_stage=1), "identity.layout.pp_stage"),
        (LayoutIdentity(name="x", ep_size=2, ep_rank=2), "identity.layout.ep_rank"),
        (LayoutIdentity(name="x", sp_size=2), "identity.layout.sp_backend"),
        (LayoutIdentity(name="x", sp_backend="ring"), "identity.layout.sp_backend"),
    ],
)
def test_A3_a_layout_that_contradicts_itself_has_no_key(layout: LayoutIdentity, path: str) -> None:
    with pytest.raises(HostWeightsError) as caught:
        artifact_key(msgspec.structs.replace(make_identity(), layout=layout))
    assert caught.value.failure.details["path"] == path


def test_A3_why_names_every_field_that_differs_with_both_values() -> None:
    left = make_identity()
    right = msgspec.structs.replace(
        make_identity("acme/other"), layout=LayoutIdentity(name="blocks", tp_size=2, tp_rank=1), restorer_schema=2
    )
    assert why(left, left) == ()
    assert [str(difference) for difference in why(left, right)] == [
        "identity.source.model: 'acme/tiny' != 'acme/other'",
        "identity.layout.tp_size: 1 != 2",
        "identity.layout.tp_rank: 0 != 1",
        "identity.restorer_schema: 1 != 2",
    ]


def test_A4_encodings_of_layouts_without_later_coordinates_are_what_earlier_readers_know() -> None:
    assert msgspec.json.encode(LayoutIdentity(name="x")) == b'{"name":"x","tp_size":1,"tp_rank":0}'
    later = LayoutIdentity(name="x", pp_size=2)
    assert msgspec.json.encode(later) == b'{"name":"x","tp_size":1,"tp_rank":0,"pp_size":2}'
    assert msgspec.json.decode(msgspec.json.encode(later), type=LayoutIdentity) == later
