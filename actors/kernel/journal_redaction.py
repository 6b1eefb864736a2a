"""A journal without file names: every absolute path is replaced, part by part, by digests under a key of its own."""

import re
import secrets
from hashlib import blake2s

import msgspec

_ODD = r"\s'\":,;()\[\]{}<>"
"""Where a path in a sentence ends, for all that one can see."""
_PART = rf"[^/{_ODD}]+"
_BEGIN = r"(?:(?<![\w/.:])/+|(?<=:)/|(?<=file:/)/|(?<=://)/+)"
"""Where an absolute path begins: not within a relative one, nor at the host of a URL unless its scheme is file."""
_PATHS = re.compile(rf"{_BEGIN}{_PART}(?:/+{_PART})*")
_NAME = re.compile(r"[^/]+")
_TO_THE_LAST_ODD_NAME = re.compile(rf"/.*[{_ODD}][^/]*", re.DOTALL)
_SENTENCES = frozenset({"text", "reason"})
"""Fields that may begin with a path and go on with words; a text in any other field is a path as a whole."""
_ODD_PATHS_KEPT = 1024
"""About as many are known to later records; a record knows its own in any case."""


class Redactor:
    """Replaces ``/data/llm`` by ``/p-5b1c09d2/p-77aa01fe``: equal paths stay equal, and a path under another stays so.

    Nobody can try names out on the digests, since the key is drawn for one journal and kept nowhere.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._odd: set[str] = set()

    def encode(self, record: object) -> bytes:
        """A record, or a list of them, without paths as msgpack; raises as the encoder does for what has no form."""
        return msgspec.msgpack.encode(self.record(record))

    def record(self, record: object) -> object:
        """A record, ready to be encoded, without paths."""
        plain = msgspec.to_builtins(record, builtin_types=(bytes,))
        found: set[str] = set()
        _learn(None, plain, found)
        new = found - self._odd
        if len(self._odd) < _ODD_PATHS_KEPT:
            self._odd |= new
        return self._walk(None, plain, self._odd | new if new else self._odd)

    def _walk(self, field: object, value: object, odd: set[str]) -> object:
        match value:
            case str():
                begin = _begin_of_path(field, value)
                return self._in_sentence(value[:begin], odd) + _NAME.sub(self._name, value[begin:])
            case dict():
                return {name: self._walk(name, item, odd) for name, item in value.items()}
            case list() | tuple():
                return [self._walk(field, item, odd) for item in value]
            case _:
                return value

    def _in_sentence(self, text: str, odd: set[str]) -> str:
        if "/" not in text:
            return text
        known = [path for path in odd if path in text]
        return (_paths_among(known) if known else _PATHS).sub(self._path, text)

    def _path(self, found: re.Match[str]) -> str:
        return _NAME.sub(self._name, found.group())

    def _name(self, found: re.Match[str]) -> str:
        name = found.group().encode(errors="surrogatepass")  # as the system gives names that are no UTF-8
        return f"p-{blake2s(name, key=self._key, digest_size=4).hexdigest()}"


def _paths_among(known: list[str]) -> re.Pattern[str]:
    """Paths in a sentence that names these: one goes on as far as one can see, or to where a known one begins."""
    odd = "|".join(sorted(map(re.escape, known), key=len, reverse=True))
    return re.compile(rf"(?:{odd}|{_BEGIN}{_PART})(?:(?!/*(?:{odd}))/+{_PART})*")


def _begin_of_path(field: object, value: str) -> int:
    """Where in a field's text the path begins that goes on to its end; the length of the text if none does."""
    if field is None or field in _SENTENCES:
        return len(value)
    url = value.find(":///")
    begin = 0 if url < 0 else url + len("://")
    return begin if value.startswith("/", begin) else len(value)


def _learn(field: object, value: object, found: set[str]) -> None:
    """Find paths whose end no sentence would show, each up to its last odd name: what follows is seen as ever."""
    match value:
        case str():
            odd = _TO_THE_LAST_ODD_NAME.match(value, _begin_of_path(field, value))
            if odd is not None:
                found.add(odd.group())
        case dict():
            for name, item in value.items():
                _learn(name, item, found)
        case list() | tuple():
            for item in value:
                _learn(field, item, found)
        case _:
            pass
