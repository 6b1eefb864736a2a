"""Which files make up a checkpoint: a file, an indexed directory, or a directory with one file."""

import errno
import json
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from ..messages.failure import Code, HostWeightsError, Stage, error
from .source_files import open_failure, open_regular, stamp_of

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_CANONICAL = ("model", "diffusion_pytorch_model")
_INDEX_NAME = re.compile(r"\.safetensors\.index(\.[^.]+)?\.json$")
_MAX_INDEX_BYTES = 100_000_000
_SAFE_PART = re.compile(r"[^\x00/\\]+")


class Selection(Struct, frozen=True):
    """The files to open: relative name -> path as named, and for an index the file name of each key."""

    root: Path
    files: Mapping[str, Path]
    assignment: Mapping[str, str] | None


def select_files(path: Path) -> Selection:
    """Decide which files a checkpoint consists of, without opening any of them but the index.

    Raises source_missing when there is nothing to load, source_ambiguous when there are several sets and no index,
    source_corrupt for a bad index, permission_denied and io_error when the path cannot be looked at.
    """
    root = Path(path).absolute()
    if _is(stat.S_ISDIR, root):
        return _select_in_directory(root)
    if _INDEX_NAME.search(root.name):
        return _select_by_index(root.parent, root.name)
    if not root.name.endswith(SUFFIX):
        raise error(
            Stage.SOURCE,
            Code.SOURCE_MISSING,
            f"{root} is neither a directory nor a {SUFFIX} file or index; expected a checkpoint file or its directory",
            file=root,
        )
    return Selection(root.parent, {root.name: root}, None)


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    """Whether something of this kind is there; raises like ``open_failure`` when that cannot be found out."""
    try:
        return kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except ValueError as problem:
        # A NUL in the path: no file has such a name.
        raise open_failure(path, FileNotFoundError(errno.ENOENT, str(problem))) from problem
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            return False
        raise open_failure(path, problem) from problem


def resolve_link(path: Path) -> Path:
    """Follow links once, to the file that holds the bytes; source_missing when they dangle or loop."""
    try:
        return path.resolve(strict=True)
    except OSError as problem:
        raise open_failure(path, problem) from problem
    except RuntimeError as problem:
        # How Python before 3.13 reports a loop.
        raise open_failure(path, OSError(errno.ELOOP, str(problem))) from problem


def _select_in_directory(root: Path) -> Selection:
    try:
        names = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
    except OSError as problem:
        raise open_failure(root, problem) from problem
    index = _choose_index(root, [name for name in names if name.endswith(INDEX_SUFFIX)])
    if index is not None:
        return _select_by_index(root, index)
    files = [name for name in names if name.endswith(SUFFIX)]
    if len(files) > 1:
        raise _several(root, files, "no index says which of them belong together")
    if not files:
        wanted = ", ".join(f"{name}{SUFFIX}" for name in _CANONICAL)
        text = f"{root} holds no checkpoint: looked for *{INDEX_SUFFIX}, {wanted}, or one *{SUFFIX} file"
        raise error(Stage.SOURCE, Code.SOURCE_MISSING, text, file=root)
    return Selection(root, {files[0]: root / files[0]}, None)


def _choose_index(root: Path, found: list[str]) -> str | None:
    """The only index, or the one with a canonical name among several."""
    if len(found) > 1:
        canonical = [name for name in found if name.removesuffix(INDEX_SUFFIX) in _CANONICAL]
        if len(canonical) != 1:
            raise _several(root, found, "more than one index")
        return canonical[0]
    return found[0] if found else None


def _several(root: Path, names: list[str], why: str) -> HostWeightsError:
    text = f"{root} holds {', '.join(names)}: {why}; name the file to load, or remove the others"
    return error(Stage.SOURCE, Code.SOURCE_AMBIGUOUS, text, file=root, found=", ".join(names))


def _select_by_index(root: Path, index: str) -> Selection:
    assignment = _read_index(root / index)
    files = {name: root / name for name in sorted(set(assignment.values()))}
    missing = [name for name, path in files.items() if not _is(stat.S_ISREG, path)]
    if missing:
        text = f"{root / index} names {len(files)} files, {len(missing)} are missing or no files: {', '.join(missing)}"
        raise error(Stage.SOURCE, Code.SOURCE_MISSING, text, file=root / index, missing=", ".join(missing))
    return Selection(root, files, assignment)


def _read_index(path: Path) -> dict[str, str]:
    with open_regular(path) as (descriptor, status):
        size_bytes = stamp_of(path, status).size_bytes
        if size_bytes > _MAX_INDEX_BYTES:
            text = f"has {size_bytes} bytes, more than the limit of {_MAX_INDEX_BYTES}"
            raise _bad_index(path, text)
        with open(descriptor, "rb", closefd=False) as stream:
            text_bytes = stream.read(size_bytes)
    try:
        document: object = json.loads(text_bytes.decode(), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as problem:
        raise _bad_index(path, f"is not valid JSON: {problem}") from problem
    weight_map: object = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(path, "has no weight_map of tensor names to file names")
    assignment: dict[str, str] = {}
    for key, name in weight_map.items():
        assignment[str(key)] = _checked_name(path, str(key), name)
    return assignment


def _unique(path: Path, pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _bad_index(path, f"names {twice} twice", tensor=twice)
    return result


def _checked_name(path: Path, key: str, name: object) -> str:
    """A shard's name: relative, inside the checkpoint's folder as written. Where a link then leads is its owner's."""
    if not isinstance(name, str) or not name.endswith(SUFFIX):
        raise _bad_index(path, f"maps {key} to {name!r}, expected the name of a {SUFFIX} file", tensor=key)
    # An absolute name has an empty first part.
    if any(part in {".", ".."} or not _SAFE_PART.fullmatch(part) for part in name.split("/")):
        raise _bad_index(path, f"maps {key} to {name!r}, which leaves the checkpoint's folder", tensor=key)
    return name


def _bad_index(path: Path, text: str, **details: object) -> HostWeightsError:
    return error(Stage.SOURCE, Code.SOURCE_CORRUPT, f"index {path} {text}", retryable=False, file=path, **details)
