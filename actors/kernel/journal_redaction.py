"""A journal without file names: every absolute path is replaced, part by part, by digests under a key of its own."""

import re
import secrets
from hashlib import blake2s

import msgspec

_PATH = re.compile(r"(?<![\w/.:])(?:/[^/\s'\":,;()\[\]{}<>]+)+")


class Redactor:
    """Replaces ``/data/llm`` by ``/p-5b1c09d2/p-77aa01fe``: equal paths stay equal, and a path under another stays so.

    Nobody can try names out on the digests, since the key is drawn for one journal and kept nowhere.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def record(self, record: object) -> object:
        """A record, ready to be encoded, without paths."""
        return self._walk(msgspec.to_builtins(record, builtin_types=(bytes,)))

    def _walk(self, value: object) -> object:
        match value:
            case str():
                return _PATH.sub(self._path, value)
            case dict():
                return {key: self._walk(item) for key, item in value.items()}
            case list() | tuple():
                return [self._walk(item) for item in value]
            case _:
                return value

    def _path(self, found: re.Match[str]) -> str:
        parts = found.group().split("/")[1:]
        return "".join(f"/p-{blake2s(part.encode(), key=self._key, digest_size=4).hexdigest()}" for part in parts)
