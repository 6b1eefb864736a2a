"""Messages: frozen, tagged, closed, bounded, and readable by later versions."""

import ast
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from hostweights.messages import AnyMessage, Config, Failure
from hostweights.messages.base import MESSAGES_VERSION, Digest, FileName, Generation, Message
from hostweights.messages.envelope import TraceParent
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from hostweights.messages.identity import ArtifactIdentity
from hostweights.messages.journal import JournalHeader, WrittenEntry
from hostweights.messages.manifest import FileEntry, TensorEntry
from hostweights.messages.store import Release, Released

FOLDER = Path(__file__).resolve().parents[2] / "messages"
MESSAGES = get_args(AnyMessage)
RECORDS = get_args(JournalHeader | WrittenEntry)


def test_D1_every_message_class_is_in_a_union() -> None:
    declared = {
        node.name
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "Message" for b in node.bases)
    }

    assert declared == {each.__name__ for each in (*MESSAGES, *RECORDS)}


@pytest.mark.parametrize("kind", [*MESSAGES, *RECORDS], ids=lambda kind: kind.__name__)
def test_D1_messages_are_frozen_tagged_and_closed(kind: type[Message]) -> None:
    config = kind.__struct_config__

    assert config.frozen
    assert config.forbid_unknown_fields
    assert isinstance(config.tag, str)


def test_D1_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in (*MESSAGES, *RECORDS)]

    assert len(tags) == len(set(tags))


def test_D1_a_message_survives_the_wire_by_its_tag() -> None:
    sent = Released(lease_id="lease-1", known=True)

    got = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=AnyMessage)

    assert got == sent


def test_D1_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.json.decode(b'{"type":"store.release","lease_id":"a","surprise":1}', type=AnyMessage)


@pytest.mark.parametrize("lease_id", ["", "x" * 129])
def test_D1_field_limits_hold_at_the_edge(lease_id: str) -> None:
    raw = msgspec.json.encode(Release(lease_id=lease_id))

    with pytest.raises(msgspec.ValidationError, match="lease_id"):
        msgspec.json.decode(raw, type=Release)


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, -1])
def test_T81_integers_out_of_range_are_refused_by_field(value: int) -> None:
    entry = {
        "name": "w",
        "kind": "parameter",
        "role": "weight",
        "file": "weights-00001.safetensors",
        "offset": value,
        "size_bytes": 4,
        "shape": [1],
        "dtype": "F32",
        "stride": [1],
        "digest": "0" * 64,
    }

    with pytest.raises(msgspec.ValidationError, match="offset"):
        msgspec.json.decode(msgspec.json.encode(entry), type=TensorEntry)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".hidden", "a/b", ""])
def test_A4_a_file_name_in_a_manifest_cannot_leave_its_folder(name: str) -> None:
    raw = msgspec.json.encode({"name": name, "size_bytes": 0, "data_offset": 0, "digest": "0" * 64})

    with pytest.raises(msgspec.ValidationError, match="name"):
        msgspec.json.decode(raw, type=FileEntry)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (FileName, "model.safetensors"),
        (Digest, "0a" * 32),
        (Generation, "00000001"),
        (TraceParent, f"00-{'0a' * 16}-{'0b' * 8}-01"),
    ],
)
def test_D1_a_text_of_fixed_form_ends_where_it_says(kind: object, text: str) -> None:
    assert msgspec.convert(text, kind) == text
    for longer in (text + "\n", "\n" + text, text + "/"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(longer, kind)


def test_D6_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="rooot"):
        msgspec.convert({"rooot": "/x"}, Config)


def test_D6_a_setting_out_of_range_is_refused_by_path() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"wait\.build_s"):
        msgspec.convert({"root": "/x", "wait": {"build_s": 0}}, Config)


def test_A2_a_failure_carries_stage_code_and_facts() -> None:
    failed = error(Stage.LOOKUP, Code.IO_ERROR, "disk gone", retryable=True, path="/x", errno=5)

    assert isinstance(failed, HostWeightsError)
    assert failed.code is Code.IO_ERROR
    assert failed.failure == Failure(
        stage=Stage.LOOKUP,
        code=Code.IO_ERROR,
        retryable=True,
        text="disk gone",
        details={"path": "/x", "errno": "5"},
    )
    assert str(failed) == "disk gone"


def test_A3_stored_identity_of_version_1_is_still_read() -> None:
    stored = (Path(__file__).parent / "samples" / "identity-v1.json").read_bytes()

    identity = msgspec.json.decode(stored, type=ArtifactIdentity)

    assert identity.schema == 1
    assert identity.source.model == "sample"


def test_D1_the_version_of_messages_is_stated() -> None:
    assert MESSAGES_VERSION == 1
