"""A journal without file names: every absolute path is replaced, part by part, by digests under a key of its own."""

import re
import secrets
from hashlib import blake2s

import msgspec

_PART = r"[^/\s'\":,;()\[\]{}<>]+"
_BEGIN = r"(?:(?<![\w/.:])/+|(?<=:)/|(?<=file:/)/|(?<=://)/+)"
"""Where an absolute path begins: not within a relative one, nor at the host of a URL unless its scheme is file."""
_REST = rf"(?:/+{_PART})*"
_PATH = rf"{_BEGIN}{_PART}{_REST}"
_NAME = re.compile(r"[^/]+")
_ENDS_IN_A_SENTENCE = re.compile(r"[\s'\":,;()\[\]{}<>]")
_SENTENCES = frozenset({"text", "reason"})
"""Fields that may begin with a path and go on with words; a text in any other field is a path as a whole."""
_ODD_PATHS_KEPT = 1024


class Redactor:
    """Replaces ``/data/llm`` by ``/p-5b1c09d2/p-77aa01fe``: equal paths stay equal, and a path under another stays so.

    Nobody can try names out on the digests, since the key is drawn for one journal and kept nowhere.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._odd: set[str] = set()
        self._paths = re.compile(_PATH)

    def encode(self, record: object) -> bytes:
        """A record, or a list of them, without paths as msgpack; raises as the encoder does for what has no form."""
        return msgspec.msgpack.encode(self.record(record))

    def record(self, record: object) -> object:
        """A record, ready to be encoded, without paths."""
        plain = msgspec.to_builtins(record, builtin_types=(bytes,))
        if self._learn(plain):
            odd = sorted(map(re.escape, self._odd), key=len, reverse=True)
            self._paths = re.compile("|".join([*(path + _REST for path in odd), _PATH]))
        return self._walk(plain)

    def _learn(self, value: object) -> bool:
        """Remember paths whose end no sentence would show; whether there is a new one."""
        match value:
            case dict():
                return sum(self._learn_field(name, item) for name, item in value.items()) > 0
            case list() | tuple():
                return sum(self._learn(item) for item in value) > 0
            case _:
                return False

    def _learn_field(self, name: object, value: object) -> bool:
        if not isinstance(value, str):
            return self._learn(value)
        path = value[value.find(":///") + len("://") :] if ":///" in value else value
        odd = name not in _SENTENCES and path.startswith("/") and _ENDS_IN_A_SENTENCE.search(path) is not None
        if not odd or path in self._odd or len(self._odd) >= _ODD_PATHS_KEPT:
            return False
        self._odd.add(path)
        return True

    def _walk(self, value: object) -> object:
        match value:
            case str():
                return self._paths.sub(self._path, value)
            case dict():
                return {key: self._walk(item) for key, item in value.items()}
            case list() | tuple():
                return [self._walk(item) for item in value]
            case _:
                return value

    def _path(self, found: re.Match[str]) -> str:
        return _NAME.sub(self._name, found.group())

    def _name(self, found: re.Match[str]) -> str:
        name = found.group().encode(errors="surrogatepass")  # as the system gives names that are no UTF-8
        return f"p-{blake2s(name, key=self._key, digest_size=4).hexdigest()}"
