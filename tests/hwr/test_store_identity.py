import json
import os
import subprocess
import sys
from enum import Enum, IntEnum
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from hostweights.hwr.identity import artifact_key, canonical
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.identity import AdaptationIdentity, AdaptationKind, ArtifactIdentity, LayoutIdentity
from store_kit import make_identity

GOLDEN_KEY = "b3e5210d21e84d2b107dd9e8269b38cb4bb5381adbafb46a48b661cf2de18ddd"


def test_A3_the_key_of_a_fixed_identity_never_changes() -> None:
    assert artifact_key(make_identity()) == GOLDEN_KEY


def test_A3_canonical_form_is_sorted_compact_ascii_without_defaults_left_out() -> None:
    form = canonical(make_identity("modèle"))
    assert form.isascii()
    assert b" " not in form
    assert b'"model":"mod\\u00e8le"' in form
    assert form.startswith(b'{"adaptation":{"fingerprint":null,"kind":"base","merge_rule":null},"component":')


def test_A3_another_process_with_another_hash_seed_gives_the_same_key() -> None:
    script = "from store_kit import make_identity, open_store; from hostweights.hwr.identity import artifact_key\n"
    script += "print(artifact_key(make_identity()))"
    for seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert output.stdout.strip() == GOLDEN_KEY


_WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(model=_WORDS, implementation=_WORDS, version=st.integers(0, 2**63 - 1), stages=st.integers(1, 3))
def test_A3_the_form_is_that_of_json_with_sorted_keys_whatever_a_text_holds(
    model: str, implementation: str, version: int, stages: int
) -> None:
    identity = _with("source.model", model)
    producer = msgspec.structs.replace(identity.producer, implementation=implementation, version=version)
    layout = LayoutIdentity(name="blocks", pp_size=stages)
    identity = msgspec.structs.replace(identity, producer=producer, layout=layout)
    expected = json.dumps(msgspec.to_builtins(identity), sort_keys=True, separators=(",", ":"))
    assert canonical(identity) == expected.encode()


def test_A3_each_character_has_the_escape_of_json() -> None:
    for character in [*map(chr, range(256)), "\u2028", "\U0001f600"]:
        assert json.dumps(f"a{character}").encode() in canonical(_with("source.model", f"a{character}"))


def test_A3_a_number_of_another_class_gives_the_key_of_the_plain_one() -> None:
    class Size(IntEnum):
        ONE = 1

    assert artifact_key(_with("layout.sp_size", Size.ONE)) == GOLDEN_KEY


@pytest.mark.parametrize("model", ["acme/tiny", "acme/é"])
def test_A3_a_text_of_an_enumeration_gives_the_key_of_the_plain_one(model: str) -> None:
    named = Enum("named", {"MODEL": model}, type=str)

    assert artifact_key(_with("source.model", named["MODEL"])) == artifact_key(_with("source.model", model))


def _with(path: str, value: object) -> ArtifactIdentity:
    """The fixed identity with the field at ``path`` changed."""
    identity = make_identity()
    outer, _, inner = path.partition(".")
    if inner:
        value = msgspec.structs.replace(getattr(identity, outer), **{inner: value})
    return msgspec.structs.replace(identity, **{outer: value})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("source.model", "acme/other"),
        ("source.content", "00" * 32),
        ("component.name", "encoder"),
        ("component.ownership", "00" * 32),
        ("representation.name", "fp8"),
        ("representation.dtype", "F32"),
        ("layout.name", "flat"),
        ("layout.tp_size", 2),
        ("adaptation", AdaptationIdentity(kind=AdaptationKind.MERGED, fingerprint="11" * 32, merge_rule="add")),
        ("producer.name", "other"),
        ("producer.version", 2),
        ("producer.implementation", "two"),
        ("manifest_schema", 2),
        ("restorer_schema", 2),
    ],
)
def test_A3_one_changed_field_changes_the_key(path: str, value: object) -> None:
    assert artifact_key(_with(path, value)) != GOLDEN_KEY


def test_A3_tensor_parallel_ranks_have_different_keys() -> None:
    keys = {artifact_key(_with("layout", LayoutIdentity(name="blocks", tp_size=4, tp_rank=r))) for r in range(4)}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("layout.tp_size", 1.0, "identity.layout.tp_size"),
        ("producer.version", float("nan"), "identity.producer.version"),
        ("producer.version", True, "identity.producer.version"),
        ("source.content", "unknown", "identity.source.content"),
        ("source.content", None, "identity.source.content"),
        ("source.model", "", "identity.source.model"),
        ("source.model", b"acme", "identity.source.model"),
        ("source.model", "\ud800", "identity.source.model"),
        ("producer.implementation", object(), "identity.producer.implementation"),
        ("restorer_schema", 2**64, "identity.restorer_schema"),
        ("layout.tp_rank", 1, "identity.layout.tp_rank"),
        ("schema", 2, "identity.schema"),
        ("adaptation", AdaptationIdentity(kind=AdaptationKind.MERGED), "identity.adaptation"),
        ("adaptation", AdaptationIdentity(fingerprint="11" * 32), "identity.adaptation"),
    ],
)
def test_T36_a_value_that_names_nothing_stable_is_refused_with_its_path(path: str, value: object, named: str) -> None:
    with pytest.raises(HostWeightsError) as caught:
        artifact_key(_with(path, value))
    assert caught.value.code is Code.INVALID_CONFIG
    assert caught.value.failure.details["path"] == named
    assert named in caught.value.failure.text
