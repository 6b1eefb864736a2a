"""What is written down holds no secret: credentials of remotes, tokens, values of the environment, redacted paths."""

import asyncio
import http.server
import io
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny_model
from hostweights import Config, HostWeights, HostWeightsError, open_sync, warm
from hostweights.actors.kernel.journal_redaction import Redactor
from hostweights.cli import app
from hostweights.messages.config import Mode, RemotePolicy, RuntimePolicy
from hostweights.messages.failure import Code, Stage, error
from hostweights.messages.journal import JournalPolicy
from hostweights.observe import JsonFormatter

SECRET = "s3cr3t-t0ken"  # noqa: S105  # made up


class Telling(http.server.BaseHTTPRequestHandler):
    """Refuses everything, and says aloud what it was given."""

    heard: list[str]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Say nothing."""

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        self.heard.append(given)
        self.send_response(403, f"not for {given}")
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def telling_server() -> Iterator[tuple[str, list[str]]]:
    Telling.heard = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Telling) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}/weights", Telling.heard
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All that is logged on every level, as lines of JSON."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter(service="test"))
    logger = logging.getLogger("hostweights")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield written
    logger.removeHandler(handler)
    logger.setLevel(level)


async def load(place: Path, url: str) -> list[str]:
    """Load with a remote and a journal; what the caller was told."""
    journal = JournalPolicy(path=str(place / "run.journal"))
    config = Config(
        root=str(place / "store"),
        remote=RemotePolicy(url=url, attempts=2),
        runtime=RuntimePolicy(journal=journal),
    )
    try:
        async with HostWeights(config) as host:
            model = await host.load(tiny_model.factory(), str(place / "model.safetensors"))
            return [repr(model.report)]
    except HostWeightsError as refused:
        return [repr(refused.failure)]


def leaks(place: Path, *texts: str) -> list[str]:
    files = [str(path) for path in place.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    return files + [text for text in texts if SECRET in text]


def test_S_credentials_of_a_remote_stand_in_no_journal_report_or_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    from fsspec.config import conf

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setitem(conf, "http", {"client_kwargs": {"headers": {"Authorization": f"Bearer {SECRET}"}}})
    tiny_model.make_checkpoint(tmp_path)
    with telling_server() as (address, heard):
        told = asyncio.run(load(tmp_path, f"http://{address}"))
    assert f"Bearer {SECRET}" in heard
    assert (tmp_path / "run.journal").stat().st_size > 1000
    assert leaks(tmp_path, *told, log.getvalue()) == []


@pytest.mark.parametrize("url", [f"http://user:{SECRET}@127.0.0.1:9/w", f"http://127.0.0.1:9/w?token={SECRET}"])
def test_S_a_url_with_credentials_is_refused_and_written_nowhere(tmp_path: Path, url: str, log: io.StringIO) -> None:
    checkpoint = tiny_model.make_checkpoint(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    told = asyncio.run(load(tmp_path, url))
    config = Config(root=str(tmp_path / "store"), remote=RemotePolicy(url=url))
    with pytest.raises(HostWeightsError) as refused:
        warm(config, tiny_model.factory(), checkpoint)
    assert Code.INVALID_CONFIG in told[0]
    assert refused.value.code is Code.INVALID_CONFIG
    assert leaks(tmp_path, *told, str(refused.value), log.getvalue()) == []
    assert sorted(tmp_path.rglob("*")) == before


async def disabled_then_preferred(config: Config, checkpoint: Path) -> str:
    """What a host in mode disabled says to a load in another mode, after one in its own."""
    async with HostWeights(config) as host:
        await host.load(tiny_model.factory(), checkpoint)
        with pytest.raises(HostWeightsError) as refused:
            await host.load(tiny_model.factory(), checkpoint, mode=Mode.PREFERRED)
    return str(refused.value)


def test_S_mode_disabled_serves_whatever_the_url_and_no_other_mode_does(tmp_path: Path) -> None:
    checkpoint = tiny_model.make_checkpoint(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    remote = RemotePolicy(url=f"http://user:{SECRET}@127.0.0.1:9/w")
    told = asyncio.run(
        disabled_then_preferred(Config(root=str(tmp_path / "store"), mode=Mode.DISABLED, remote=remote), checkpoint)
    )
    assert "credentials" in told
    assert SECRET not in told
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "url", [f"http://user:{SECRET}@h/w", f"http://h/w?t={SECRET}", f"a::http://u:{SECRET}@{'h' * 5000}"]
)
def test_S_the_settings_of_a_remote_are_shown_without_its_credentials(tmp_path: Path, url: str) -> None:
    words = ["config", "--set", f"root={tmp_path}/store", "--set", f"remote.url={url}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code in (1, 2)
    assert done.stderr.startswith("error: ")
    assert SECRET not in done.stdout + done.stderr
    assert SECRET not in CliRunner().invoke(app, [*words, "--json", "--set", "mode=disabled"]).output


@pytest.mark.parametrize("name", ["my secret model", "a,b", "it's", "(copy) [1]", "x:y", "plain"])
def test_S_a_redacted_journal_tells_no_part_of_a_path_whatever_letters_it_has(name: str) -> None:
    redactor = Redactor()
    path = f"/srv/{name}/model.safetensors"
    failed = error(Stage.SOURCE, Code.SOURCE_CORRUPT, f"{path}: the header is no JSON, see {path}", file=path, size=7)
    first = redactor.record(failed.failure)
    assert isinstance(first, dict)
    text, details = first["text"], first["details"]
    assert not any(word in f"{first}" for word in (name, "srv", "model.safetensors"))
    assert text == f"{details['file']}: the header is no JSON, see {details['file']}"
    assert details["size"] == "7"
    again = redactor.record(failed.failure)
    assert again == first


def test_S_sentences_that_begin_with_a_path_stay_readable() -> None:
    failed = error(Stage.SOURCE, Code.SOURCE_MISSING, "/srv/m is not a regular file", file="/srv/m")
    written = Redactor().record(failed.failure)
    assert isinstance(written, dict)
    assert written["text"] == f"{written['details']['file']} is not a regular file"
    assert "srv" not in written["text"]


@pytest.mark.parametrize(
    "text",
    [
        "file:///srv/hidden/weights/k/artifact.json: could not read it",
        "file://localhost/srv/hidden: gone",
        "simplecache::file:///srv/hidden",
        "local:///srv/hidden",
        "file:/srv/hidden",
        "at:/srv/hidden",
        "//srv/hidden",
        "/srv//hidden/x",
        "root=/srv/hidden, (/srv/hidden)",
    ],
)
def test_S_a_path_is_hidden_wherever_it_stands(text: str) -> None:
    written = Redactor().record(error(Stage.REMOTE, Code.IO_ERROR, text).failure)
    assert isinstance(written, dict)
    assert not any(name in written["text"] for name in ("srv", "hidden", "weights"))
    assert written["text"].count("/") == text.count("/")


@pytest.mark.parametrize(
    "text", ["GET https://host/w: 404", "s3://bucket/w", "blocks/0/weight", "./here", "1/2", "a / b"]
)
def test_S_what_is_no_absolute_path_stays(text: str) -> None:
    written = Redactor().record(error(Stage.REMOTE, Code.IO_ERROR, text).failure)
    assert isinstance(written, dict)
    assert written["text"] == text


@pytest.mark.parametrize("name", ["hidden", "hidden vault"])
def test_S_a_redacted_journal_tells_no_path_of_a_remote_that_is_a_directory(tmp_path: Path, name: str) -> None:
    hidden = tmp_path / name
    hidden.mkdir()
    source = tiny_model.make_checkpoint(hidden)
    key = warm(Config(root=str(tmp_path / "elsewhere")), tiny_model.factory(), source).key
    (hidden / "remote" / key / "artifact.json").mkdir(parents=True)  # no file: each request fails
    journal = JournalPolicy(path=str(tmp_path / "run.journal"), redact_paths=True)
    config = Config(
        root=str(hidden / "store"),
        remote=RemotePolicy(url=f"file://{hidden}/remote", attempts=1),
        runtime=RuntimePolicy(journal=journal),
    )
    with open_sync(config) as host:
        told = host.load(tiny_model.factory(), source)
    assert any(attempt.failure is not None and name in attempt.failure.text for attempt in told.report.attempts)
    written = (tmp_path / "run.journal").read_bytes()
    assert b"io_error" in written
    assert not any(part in written for part in (b"hidden", b"vault"))
