"""A remote behind any URL that fsspec can open."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, Final, cast
from urllib.parse import urlsplit

from ...messages.config import RemotePolicy
from ...messages.failure import Code, HostWeightsError, Stage, error
from ...messages.remote_url import wrong_url
from ..filesystem import files

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from fsspec.implementations.http import HTTPFileSystem

_CHUNK_BYTES: Final = 8 * 1024**2
_DENIED: Final = frozenset({401, 403})
_ABSENT: Final = frozenset({404, 410})
_NO_WAY: Final = (FileNotFoundError, NotADirectoryError)
_RANGE_REFUSED: Final = 416
_PARTIAL: Final = 206


class FsspecRemote:
    """Implements ``contract.Remote``. Opened by ``open_remote``."""

    def __init__(self, filesystem: AbstractFileSystem, root: str, url: str, timeout_s: float) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    @property
    def url(self) -> str:
        """The directory, without a slash at its end."""
        return self._url

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Exactly this range, in one request that is not repeated."""
        with self._answered("read", path):
            is_http = self._speaks_http()
            data = self._http(path, offset, size_bytes) if is_http else self._cat(path, offset, offset + size_bytes)
        if len(data) != size_bytes:
            came = "more" if len(data) > size_bytes else len(data)
            what = f"bytes {offset} to {offset + size_bytes} came as {came} bytes"
            raise self._failed(path, f"{what}: the answer was cut off or the file is another one")
        return data

    def stream(self, path: str) -> Generator[bytes, None, None]:
        """The file from its start, in one request, of which any 8 MiB may be waited for as long as for one range."""
        options: dict[str, object] = {}
        if self._speaks_http():
            from aiohttp import ClientTimeout

            pause = ClientTimeout(total=None, sock_connect=self._timeout_s, sock_read=self._timeout_s)
            options = {"block_size": 0, "size": 1, "timeout": pause}  # a stream, without asking for the size first
        with (
            self._answered("read", path),
            cast("BinaryIO", self._filesystem.open(self._full(path), "rb", **options)) as source,
        ):
            waited_s, came_bytes = 0.0, 0
            while True:
                begun_s = time.monotonic()
                chunk = source.read(_CHUNK_BYTES)  # what is there, be it a byte
                waited_s += time.monotonic() - begun_s
                if not chunk:
                    return
                came_bytes += len(chunk)
                if came_bytes >= _CHUNK_BYTES:
                    waited_s, came_bytes = 0.0, 0
                if waited_s > self._timeout_s:
                    raise TimeoutError
                yield chunk

    def read_whole(self, path: str, limit_bytes: int) -> bytes:
        """A small file, in one request."""
        with self._answered("read", path):
            data = self._http(path, None, limit_bytes) if self._speaks_http() else self._cat(path, 0, limit_bytes + 1)
        if len(data) > limit_bytes:
            raise self._failed(path, f"it has more than the {limit_bytes} bytes that were expected")
        return data

    def write(self, path: str, source_fd: int, size_bytes: int) -> None:
        """Write a file from the start of an open one."""
        with self._answered("write", path):
            self._make_parent(path)
            with cast("BinaryIO", self._filesystem.open(self._full(path), "wb", block_size=_CHUNK_BYTES)) as target:
                offset = 0
                while offset < size_bytes:
                    chunk = files().pread(source_fd, min(_CHUNK_BYTES, size_bytes - offset), offset)
                    if not chunk:
                        raise OSError(f"the local file ends at {offset}")
                    target.write(chunk)
                    offset += len(chunk)

    def replace(self, path: str, data: bytes) -> None:
        """Put a small file there: at once by a rename on a local disk, in one request on an object store."""
        from fsspec.implementations.local import LocalFileSystem

        with self._answered("write", path):
            self._make_parent(path)
            if isinstance(self._filesystem, LocalFileSystem):
                unfinished = f"{self._full(path)}.{secrets.token_hex(8)}"
                self._filesystem.pipe_file(unfinished, data)
                self._filesystem.mv(unfinished, self._full(path))
            else:
                self._filesystem.pipe_file(self._full(path), data)

    def _make_parent(self, path: str) -> None:
        self._filesystem.makedirs(self._full(path).rpartition("/")[0], exist_ok=True)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _cat(self, path: str, start: int, end: int) -> bytes:
        from fsspec.asyn import AsyncFileSystem, sync

        found: object
        if isinstance(self._filesystem, AsyncFileSystem):
            request, loop = self._filesystem._cat_file, self._filesystem.loop  # noqa: SLF001  the one call with a timeout
            found = sync(loop, request, self._full(path), start=start, end=end, timeout=self._timeout_s)
        else:
            found = self._filesystem.cat_file(self._full(path), start=start, end=end)
        assert isinstance(found, bytes), type(found)
        return found

    def _speaks_http(self) -> bool:
        return "https" in self._filesystem.protocol

    def _http(self, path: str, start: int | None, most_bytes: int) -> bytes:
        """The file from ``start`` (None: asked for whole), at most one byte more than ``most_bytes``.

        Whatever the server goes on to send is not read. Raises unsupported for a server that knows no ranges.
        """
        from fsspec.asyn import sync
        from fsspec.implementations.http import HTTPFileSystem

        filesystem = self._filesystem
        assert isinstance(filesystem, HTTPFileSystem), type(filesystem)
        data = sync(filesystem.loop, _get, filesystem, self._full(path), start, most_bytes, timeout=self._timeout_s)
        if data is None:
            raise self._error(path, Code.UNSUPPORTED, f"{self._url}/{path}: the server knows no ranges")
        assert isinstance(data, bytes), type(data)
        return data

    @contextmanager
    def _answered(self, doing: str, path: str) -> Iterator[None]:
        """Turn whatever a file system raises into a typed failure, and nothing of its text: it may hold credentials."""
        try:
            yield
        except HostWeightsError:
            raise
        except Exception as problem:  # noqa: BLE001  raised below, without the text it came with
            failure = self._failure(doing, path, problem)
        else:
            return
        raise failure  # outside the handler, so that no traceback shows what was caught

    def _failure(self, doing: str, path: str, problem: Exception) -> HostWeightsError:
        where, kind = f"{self._url}/{path}", type(problem).__name__
        status = vars(problem).get("status")
        if isinstance(problem, _NO_WAY) or status in _ABSENT:
            if doing == "write":
                text = (
                    f"{where} cannot be written ({kind}): no directory or bucket can be made there; push to another URL"
                )
                return self._error(path, Code.IO_ERROR, text)
            return self._error(path, Code.ARTIFACT_MISSING, f"there is no {where}")
        if isinstance(problem, TimeoutError):
            text = f"could not {doing} {where} within {self._timeout_s} s; try again later or raise remote.timeout_s"
            return self._error(path, Code.DEADLINE_EXCEEDED, text, retryable=True)
        if isinstance(problem, PermissionError) or status in _DENIED:
            text = f"may not {doing} {where}; give the credentials to the package behind this URL's scheme"
            return self._error(path, Code.PERMISSION_DENIED, text)
        if isinstance(problem, NotImplementedError):
            return self._error(path, Code.UNSUPPORTED, f"{where} can only be read; push to another URL")
        why = "the file is shorter than that" if status == _RANGE_REFUSED else kind + (f" {status}" if status else "")
        return self._failed(path, f"could not {doing} it: {why}")

    def _failed(self, path: str, what: str) -> HostWeightsError:
        return self._error(path, Code.IO_ERROR, f"{self._url}/{path}: {what}", retryable=True)

    def _error(self, path: str, code: Code, text: str, *, retryable: bool = False) -> HostWeightsError:
        return error(Stage.REMOTE, code, text, retryable=retryable, path=path, remote=self._url)


async def _get(filesystem: HTTPFileSystem, url: str, start: int | None, most_bytes: int) -> bytes | None:
    """On the loop of fsspec: one request, and no more of its answer than what was asked for and a byte."""
    options = dict(filesystem.kwargs)
    headers = dict(options.pop("headers", {}))
    if start is not None:
        headers["Range"] = f"bytes={start}-{start + most_bytes - 1}"
    session = await filesystem.set_session()
    data = bytearray()
    async with session.get(filesystem.encode_url(url), headers=headers, **options) as answer:
        if answer.status == _RANGE_REFUSED:
            return b""
        answer.raise_for_status()
        is_range = answer.status == _PARTIAL
        if start and not is_range:
            return None
        while len(data) <= most_bytes and (piece := await answer.content.read(most_bytes + 1 - len(data))):
            data += piece
        if start == 0 and not is_range:
            del data[most_bytes:]  # a whole file, of which the beginning was asked for
    return bytes(data)


def open_remote(policy: RemotePolicy) -> FsspecRemote:
    """Open a remote; makes no request, but some schemes connect.

    Raises HostWeightsError: invalid_config without a URL, for one with credentials or a query in it, for an unknown
    scheme and for what its package refuses; unsupported when fsspec or the scheme's package is not installed; io_error
    (retryable) when it cannot be connected to.
    """
    url = policy.url
    if url is None:
        raise error(Stage.REMOTE, Code.INVALID_CONFIG, "no remote is configured; set remote.url")
    wrong = wrong_url(url)
    if wrong is not None:
        raise error(Stage.REMOTE, Code.INVALID_CONFIG, wrong)
    scheme = urlsplit(url).scheme
    try:
        from fsspec.core import url_to_fs

        filesystem, root = url_to_fs(url)
    except ImportError as missing:
        text = f"{url} needs a package that is not installed ({missing.name or scheme}): pip install "
        raise error(Stage.REMOTE, Code.UNSUPPORTED, text + f"'hostweights[remote]' and fsspec's for {scheme}") from None
    except ValueError:
        text = f"fsspec knows no scheme {scheme!r}; expected a URL such as s3://bucket/weights or file:///srv/weights"
        raise error(Stage.REMOTE, Code.INVALID_CONFIG, text) from None
    except OSError as problem:  # some schemes connect at once; the package's own words may hold what must not be shown
        text = f"the remote {url} cannot be opened ({type(problem).__name__}); try again once it answers"
        raise error(Stage.REMOTE, Code.IO_ERROR, text, retryable=True, remote=url) from None
    except Exception as problem:  # noqa: BLE001 - whatever a package raises over a URL of its scheme
        text = f"fsspec's {scheme} makes nothing of {url} ({type(problem).__name__}); expected its own form of URL"
        raise error(Stage.REMOTE, Code.INVALID_CONFIG, text) from None
    return FsspecRemote(filesystem, root, url, policy.timeout_s)
