"""Bytes that claim more than they are: nothing is allocated for a claim, and nothing leaves but a typed refusal.

Each attack runs in a process of its own, whose private memory may grow by less than the attack claims.
"""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from child_kit import run_child
from hostweights.hwr.remote.stream_verifier import StreamVerifier
from hostweights.hwr.store_files import MAX_RECORD_BYTES, Damage
from hostweights.hwr.verification import pieces_by_file
from store_kit import open_store, published

_LIMITED = """
import json
import resource
import struct

import msgspec

from hostweights.messages.failure import HostWeightsError

PLACE = Path(sys.argv[1])


def limit(more_bytes):
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + more_bytes,) * 2)
    try:
        bytearray(2 * more_bytes)
    except MemoryError:
        return
    raise AssertionError("private memory cannot be limited here")


def refused(work):
    try:
        work()
    except HostWeightsError as failure:
        return failure.code
    raise AssertionError("not refused")


limit(96 << 20)
"""

_HEADERS = (
    _LIMITED
    + """
from hostweights.hwr.safetensors_header import read_header

for claimed in (2**62, 2**64 - 1, 2**40, 100_000_001):
    with PLACE.open("wb") as file:
        file.write(claimed.to_bytes(8, "little") + b'{"')
        file.truncate(1 << 33)  # as far as it is there at all, a hole
    say(refused(lambda: read_header(PLACE)))
huge = json.dumps({"w": {"dtype": "F32", "shape": [2**48] * 16, "data_offsets": [0, 2**800]}}).encode()
PLACE.write_bytes(len(huge).to_bytes(8, "little") + huge)
say(refused(lambda: read_header(PLACE)))
"""
)


def test_S_a_header_that_claims_more_than_any_file_has_costs_no_memory(tmp_path: Path) -> None:
    assert run_child(_HEADERS, tmp_path / "model.safetensors").split() == ["source_corrupt"] * 5


_MANIFEST = (
    _LIMITED
    + """
from blake3 import blake3
from hostweights.hwr.json_records import encode_record
from hostweights.messages.manifest import ReadyMarker

store = open_store(PLACE)
(directory,) = PLACE.glob("artifacts/*/00000001")
original = (directory / "manifest.json").read_bytes()


def rewrite(data):
    ready = msgspec.json.decode((directory / "READY.json").read_bytes(), type=ReadyMarker)
    changed = msgspec.structs.replace(
        ready, manifest_size_bytes=len(data), manifest_digest=blake3(data).hexdigest()
    )
    for name, content in (("manifest.json", data), ("READY.json", encode_record(changed))):
        (directory / name).unlink()
        (directory / name).write_bytes(content)
    for marker in directory.parent.glob("*.condemned.json"):
        marker.unlink()


def changed(change):
    manifest = json.loads(original)
    change(manifest)
    return json.dumps(manifest).encode()


directory.chmod(0o755)
EIB = 2**60
for data in (
    changed(lambda m: m["files"][0].update(size_bytes=EIB)),
    changed(lambda m: m["files"][0].update(data_offset=EIB)),
    changed(lambda m: m["files"][0].update(data_offset=EIB, size_bytes=EIB)),
    changed(lambda m: m["tensors"][0].update(shape=[2**48, 2**48], stride=[0, 0], size_bytes=EIB)),
    changed(lambda m: m["blocks"][0].update(size_bytes=EIB)),
    changed(lambda m: m["pads"][0].update(size_bytes=EIB)),
    b'{"tensors":' + b"[" * 10_000_000,
    b'{"x":' + b'{"a":' * 2_000_000,
):
    rewrite(data)
    found = miss(store)
    assert found.condemned == 1, found
say("all refused")
"""
)


def test_S_a_manifest_that_claims_an_exbibyte_costs_no_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    published(store).close()
    store.close()
    assert run_child(_MANIFEST, tmp_path / "root") == "all refused"


_SPARSE = (
    _LIMITED
    + """
store = open_store(PLACE)
say(miss(store).condemned)
"""
)


@pytest.mark.parametrize("name", ["READY.json", "manifest.json"])
def test_S_a_record_of_a_terabyte_is_not_read(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path / "root")
    directory = published(store).directory
    (directory / name).chmod(0o600)
    with (directory / name).open("r+b") as file:
        file.truncate(max(1 << 40, MAX_RECORD_BYTES + 1))
    store.close()
    assert run_child(_SPARSE, tmp_path / "root") == "1"


_MSGPACK = (
    _LIMITED
    + """
from hostweights.actors.kernel.journal_file import JournalReader, frame
from hostweights.messages import AnyMessage
from hostweights.messages.journal import JournalHeader

decode = msgspec.msgpack.Decoder(AnyMessage).decode
SIZES = b"\\xff\\xff\\xff\\xff"
BOMBS = [head + SIZES for head in (b"\\xdd", b"\\xdf", b"\\xdb", b"\\xc6", b"\\xc9")]
BOMBS += [b"\\x91" * 16_000_000, b"\\x81\\xa4type" + b"\\x81\\xa1a" * 4_000_000, b"\\x81" + b"\\xdd" + SIZES]
for bomb in BOMBS:
    try:
        decode(bomb)
    except (msgspec.MsgspecError, RecursionError):
        continue
    raise AssertionError(bomb[:10])


def read():
    with JournalReader(PLACE) as reader:
        list(reader)


for version in (1, 3):
    head = frame(msgspec.msgpack.encode(JournalHeader(package_version="1", clock_s=0.0, version=version)))
    for bomb in BOMBS:
        PLACE.write_bytes(head + frame(bomb))
        assert refused(read) == "journal_corrupt"
with PLACE.open("wb") as file:
    file.write(head + struct.pack("<II", 2**32 - 1, 0))
    file.truncate(1 << 40)
assert refused(read) == "journal_corrupt"
say("all refused")
"""
)


def test_S_bombs_of_nesting_and_of_counts_are_refused_as_messages_and_in_journals(tmp_path: Path) -> None:
    assert run_child(_MSGPACK, tmp_path / "bomb.journal") == "all refused"


MIB = b"x" * (1 << 20)


class Endless(http.server.BaseHTTPRequestHandler):
    """Answers every request with a gigabyte, whatever was asked for."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Say nothing."""

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", "bytes 0-7/8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        try:
            for _ in range(1024):
                self.wfile.write(b"100000\r\n" + MIB + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            return


@contextmanager
def endless_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/weights"
        finally:
            server.shutdown()
            thread.join()


_REMOTE = """
from hostweights.hwr.remote.fsspec_remote import open_remote
from hostweights.messages.config import RemotePolicy

import aiohttp
import fsspec.implementations.http

remote = open_remote(RemotePolicy(url=sys.argv[2], timeout_s=30.0))
"""


def test_S_an_answer_without_end_costs_a_client_of_a_remote_no_memory() -> None:
    limited = _LIMITED.replace("limit(96 << 20)", f"{_REMOTE}limit(160 << 20)")
    code = f"{limited}\nsay(refused(lambda: remote.read_whole('key/artifact.json', 65536)))\n"
    code += "say(refused(lambda: remote.read('key/file', 0, 8)))\n"
    with endless_server() as url:
        assert run_child(code, "/", url).split() == ["io_error", "io_error"]


def test_S_an_empty_tensor_that_no_byte_confirms_is_refused_while_it_is_fetched(tmp_path: Path) -> None:
    """Otherwise every full check would condemn what a fetch has just called right."""
    store = open_store(tmp_path / "root")
    manifest = published(store).manifest
    tensors = tuple(
        each if each.size_bytes else msgspec.structs.replace(each, digest="0" * 64) for each in manifest.tensors
    )
    (file,) = manifest.files
    StreamVerifier(file, pieces_by_file(manifest)[file.name], "here")
    changed = msgspec.structs.replace(manifest, tensors=tensors)
    with pytest.raises(Damage, match="is empty and differs from its digest"):
        StreamVerifier(file, pieces_by_file(changed)[file.name], "here")
