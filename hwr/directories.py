"""The directories that diffusers and transformers write: which class, which files, which record.

Only classes of the two libraries are used, found by the name that the directory states; code that lies in a directory
is never run. A library is imported when one of its classes is asked for.
"""

import errno
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from ..messages.dtypes import DType
from ..messages.failure import Code, HostWeightsError, Stage, error
from .build_mode import default_dtype
from .checkpoint import open_checkpoint
from .checkpoint_files import INDEX_SUFFIX, SUFFIX
from .dtypes import dtype_tag, torch_dtype
from .module_tensors import places
from .record_of_class import RECORD_OF_CLASS
from .records import ModelRecord, generic_record
from .skeleton import build_skeleton
from .source_files import open_failure, open_regular
from .source_memory import SourceMemory, source_fingerprint
from .stored_dtypes import StoredDtypes, stored_dtypes

_STEMS: Final = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
_MAX_JSON_BYTES: Final = 10_000_000
_NOT_INSIDE: Final = frozenset({"", ".", ".."})
_CLASS_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")
_FLOAT_DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HALVES: Final = frozenset({torch.float16, torch.bfloat16})
_IMPLEMENTATION: Final = "_implementation"
Json = Mapping[str, object]


class ModelSource(msgspec.Struct, frozen=True):
    """All that a load needs: a factory of the module, its checkpoint, its name and its record.

    ``factory`` builds the class with its stored configuration in the dtypes that the checkpoint stores, in evaluation
    mode.
    """

    factory: Callable[[], nn.Module]
    source: Path
    name: str
    record: ModelRecord


def component_names(directory: Path) -> tuple[str, ...]:
    """The components of a pipeline's directory that hold weights this library can load, in the pipeline's order.

    A directory with a model of its own has none. Raises source_missing for what is neither.
    """
    root = Path(directory)
    if not (root / "model_index.json").is_file():
        if (root / "config.json").is_file():
            return ()
        raise _no_directory(root)
    index = _read_json(root / "model_index.json")
    return tuple(name for name, value in index.items() if _is_component(root, name, value))


def model_source(
    directory: Path,
    component: str | None = None,
    variant: str | None = None,
    dtype: torch.dtype | None = None,
    memory: SourceMemory | None = None,
) -> ModelSource:
    """The model in a directory, or in a pipeline's directory the named component.

    Reads the headers of the weight files, or none of them when ``memory`` knows what they store.

    ``variant`` names one of several sets of weights beside each other ("fp16"). ``dtype`` casts floating tensors to
    it, but for those that the class itself keeps in FP32; the casts are part of the record, and so of the artifact's
    identity. Raises source_missing, source_corrupt, source_ambiguous when a pipeline has several components and none
    is named, unsupported for a class that neither library has, invalid_config for a dtype that is not floating, and
    what ``open_checkpoint`` raises.
    """
    if dtype is not None and dtype not in _FLOAT_DTYPES:
        text = f"dtype {dtype} cannot be cast to; expected one of {', '.join(map(str, _FLOAT_DTYPES))}"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    root = Path(directory)
    names = component_names(root)
    if component is None and len(names) > 1:
        text = f"{root} is a pipeline of {', '.join(names)}; name the component to load"
        raise error(Stage.SOURCE, Code.SOURCE_AMBIGUOUS, text, file=root, found=", ".join(names))
    if component is not None and component not in names:
        text = f"{root} has no component {component} with safetensors weights; it has {', '.join(names) or 'none'}"
        raise error(Stage.SOURCE, Code.SOURCE_MISSING, text, file=root)
    if component is None and not names and not (root / "config.json").is_file():
        raise _no_component(root)
    folder = root / component if component is not None else root / names[0] if names else root
    config = _read_json(folder / "config.json")
    found = _diffusers_class(folder, config) if "_class_name" in config else _transformers_class(folder, config)
    return _finished(found, _weights(folder, found.stem, variant), dtype, memory)


def _no_directory(root: Path) -> HostWeightsError:
    saved = "a directory that diffusers or transformers has saved"
    other = "other checkpoints need a factory that builds their class (hostweights warm --factory MODULE:CALLABLE)"
    if root.is_dir():
        text = f"{root} has neither model_index.json nor config.json; expected {saved}; {other}"
    elif root.exists():
        text = f"{root} is a file, which does not say how its model is built; expected {saved}; {other}"
    else:
        text = f"{root} does not exist; expected {saved}"
    return error(Stage.SOURCE, Code.SOURCE_MISSING, text, file=root)


def _no_component(root: Path) -> HostWeightsError:
    named = [name for name, value in _read_json(root / "model_index.json").items() if _is_named(value)]
    wanted = f"a config.json and *{SUFFIX} files"
    what = f"none of {', '.join(named[:10])} is there with {wanted}" if named else "its model_index.json names none"
    text = f"{root} is a pipeline's directory without components to load: {what}; save the whole pipeline there"
    return error(Stage.SOURCE, Code.SOURCE_MISSING, text, file=root)


def _is_named(value: object) -> bool:
    """Whether an entry of a pipeline's index names a class of one of the two libraries."""
    return isinstance(value, list) and len(value) == 2 and value[0] in tuple(_STEMS)


def _is_component(root: Path, name: str, value: object) -> bool:
    named = _is_named(value) and "/" not in name and name not in _NOT_INSIDE
    folder = root / name
    try:
        return named and (folder / "config.json").is_file() and any(folder.glob(f"*{SUFFIX}"))
    except OSError as problem:
        if problem.errno == errno.ENAMETOOLONG:  # no directory has such a name
            return False
        raise open_failure(folder, problem) from problem


class _Found(msgspec.Struct, frozen=True):
    """A class of a library, and how its configuration builds it.

    ``stem`` begins the names of its weight files, ``prefixes`` are what its names may have more than the checkpoint's.
    """

    name: str
    build: Callable[[], nn.Module]
    stem: str
    prefixes: Mapping[str, tuple[str, ...]]


def _diffusers_class(folder: Path, config: Json) -> _Found:
    kind = _class(folder, "diffusers", config["_class_name"])

    def build() -> nn.Module:
        module: nn.Module = kind.from_config(dict(config))
        return module

    return _Found(kind.__name__, build, _STEMS["diffusers"], {})


def _transformers_class(folder: Path, config: Json) -> _Found:
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        text = f"{folder / 'config.json'} names no one class (architectures: {named}); load it with a factory"
        raise error(Stage.SOURCE, Code.SOURCE_CORRUPT, text, file=folder)
    _refuse_code_from_elsewhere(folder, config)
    kind = _class(folder, "transformers", named[0])

    def build() -> nn.Module:
        module: nn.Module = kind(kind.config_class.from_pretrained(folder))
        return module

    prefix = f"{kind.base_model_prefix}."
    return _Found(kind.__name__, build, _STEMS["transformers"], {"": ("", prefix), prefix: ("",)})


def _refuse_code_from_elsewhere(folder: Path, config: Json) -> None:
    """Refuse a configuration by which transformers would ask a hub: for a kernel to run, or for a backbone."""
    parts: list[Json] = [config]
    while parts:
        part = parts.pop()
        if _has_backbone_elsewhere(part):
            text = f"{folder / 'config.json'} names the backbone {part['backbone']}, which transformers would ask a hub"
            text += " for; that is never done here: put the backbone's own configuration into backbone_config"
            raise error(Stage.SOURCE, Code.UNSUPPORTED, text, file=folder)
        for name, value in part.items():
            if isinstance(value, Mapping):
                parts.append(value)
            if not str(name).endswith(_IMPLEMENTATION):
                continue
            for each in value.values() if isinstance(value, Mapping) else [value]:
                if "/" in str(each):
                    text = (
                        f"{folder / 'config.json'} names code to fetch and run, {name} {each}, which is never done here"
                    )
                    raise error(Stage.SOURCE, Code.UNSUPPORTED, f"{text}; take the entry out", file=folder)


def _has_backbone_elsewhere(part: Json) -> bool:
    """Whether a backbone is named without its configuration, and not as one that timm has."""
    named = part.get("backbone")
    if not isinstance(named, str) or isinstance(part.get("backbone_config"), Mapping):
        return False
    of_timm = part.get("use_timm_backbone") is True and not part.get("backbone_kwargs")
    return "/" in named or not (of_timm or part.get("model_type") == "timm_backbone")


def _finished(found: _Found, source: Path, dtype: torch.dtype | None, memory: SourceMemory | None) -> ModelSource:
    """The source of a class whose names may differ from the checkpoint's by a prefix."""
    stored = _stored_dtypes(source, memory)
    record = RECORD_OF_CLASS.get(found.name)
    main = dtype or (torch.get_default_dtype() if stored.main is None else torch_dtype(stored.main))

    def factory() -> nn.Module:
        with default_dtype(main):
            module = found.build()
        return module.eval()

    if record is None:
        pairs = tuple((old, new) for old, others in found.prefixes.items() for new in others)
        record = generic_record(build_skeleton(factory))
        record = replace(record, renames=tuple(dict.fromkeys((*record.renames, *pairs))))
    if dtype is None:
        return ModelSource(_StoredFactory(factory, record, stored), source, found.name, record)
    record = replace(record, casts=tuple(dict.fromkeys((*record.casts, *_casts(stored, dtype)))))
    return ModelSource(_OneDtype(factory, dtype), source, found.name, record)


def _stored_dtypes(source: Path, memory: SourceMemory | None) -> StoredDtypes:
    """What a checkpoint stores: remembered while nobody touched its files, otherwise read from their headers."""
    if memory is None:
        return stored_dtypes(open_checkpoint(source))
    fingerprint = source_fingerprint(source)
    known = memory.find_dtypes(fingerprint)
    if known is None:
        known = stored_dtypes(open_checkpoint(source))
        if source_fingerprint(source) == fingerprint:
            memory.keep_dtypes(fingerprint, known)
    return known


def _casts(stored: StoredDtypes, dtype: torch.dtype) -> list[tuple[DType, DType]]:
    """The conversions from what the checkpoint stores, also of what a class keeps in FP32."""
    wanted = {dtype_tag(dtype, "dtype"), DType.F32}
    return sorted((old, new) for old in stored.floats for new in wanted if old is not new)


class _OneDtype(msgspec.Struct, frozen=True):
    """A factory whose module has one floating dtype, but for what its class keeps in FP32 at half precision."""

    factory: Callable[[], nn.Module]
    dtype: torch.dtype

    def __call__(self) -> nn.Module:
        module = self.factory()
        kept = _kept_in_fp32(module, self.dtype)
        for place in places(module):
            tensor = place.tensor
            if place.persistent and tensor.dtype in _FLOAT_DTYPES:
                part = kept.intersection(place.name.split("."))
                tensor.data = tensor.data.to(torch.float32 if part else self.dtype)
        return module


def _kept_in_fp32(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Parts of names that a class of the two libraries keeps in FP32 when it is loaded in ``dtype``."""
    strict, plain = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"
    # transformers keeps the first group apart from both half precisions, the second from FP16 only; diffusers has one.
    names: set[str] = set()
    for attribute, dtypes in ((strict, _HALVES), (plain, _HALVES if not hasattr(module, strict) else {torch.float16})):
        if dtype in dtypes and hasattr(module, attribute):
            found: object = getattr(module, attribute)
            names.update([found] if isinstance(found, str) else map(str, found) if isinstance(found, Iterable) else ())
    return names


class _StoredFactory(msgspec.Struct, frozen=True):
    """A factory whose module takes each floating tensor's dtype from the checkpoint."""

    factory: Callable[[], nn.Module]
    record: ModelRecord
    stored: StoredDtypes

    def __call__(self) -> nn.Module:
        module = self.factory()
        floats = {torch_dtype(dtype) for dtype in self.stored.floats}
        for place in places(module):
            tensor = place.tensor
            if not place.persistent or not tensor.is_floating_point() or floats == {tensor.dtype}:
                continue
            found = map(self.stored.of, self.record.candidates(place.name))
            dtypes = {torch_dtype(dtype) for dtype in found if dtype is not None}
            if tensor.dtype not in dtypes and len(dtypes) == 1:
                wanted = dtypes.pop()
                if wanted.is_floating_point:
                    tensor.data = tensor.data.to(wanted)
        return module


def _weights(folder: Path, stem: str, variant: str | None) -> Path:
    """The one set of weights to open: an index or file with the canonical name, else whatever is there."""
    if variant is None:
        single = folder / f"{stem}{SUFFIX}"
        return single if single.is_file() and not (folder / f"{stem}{INDEX_SUFFIX}").is_file() else folder
    names = (f"{stem}.{variant}{SUFFIX}", f"{stem}{SUFFIX}.index.{variant}.json")
    found = [folder / name for name in names if (folder / name).is_file()]
    if len(found) != 1:
        text = f"{folder} holds {len(found)} of {' and '.join(names)}, expected one for variant {variant}"
        raise error(Stage.SOURCE, Code.SOURCE_AMBIGUOUS if found else Code.SOURCE_MISSING, text, file=folder)
    return found[0]


def _class(folder: Path, library: str, name: object) -> Any:  # noqa: ANN401  # a class of a library without types
    """A module class of a library, by the name that a configuration states."""
    if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name):
        raise error(Stage.SOURCE, Code.SOURCE_CORRUPT, f"{folder}/config.json names the class {name!r}", file=folder)
    try:
        module = importlib.import_module(library)
    except ImportError as problem:
        text = f"{folder} holds a {name} of {library}, which cannot be imported ({problem}); pip install {library}"
        raise error(Stage.PLANNING, Code.UNSUPPORTED, text) from problem
    try:
        kind: object = getattr(module, name)
    except (AttributeError, ImportError, RuntimeError) as problem:
        raise _unknown(folder, library, name) from problem
    if not inspect.isclass(kind) or not issubclass(kind, nn.Module):
        raise _unknown(folder, library, name)
    return kind


def _unknown(folder: Path, library: str, name: str) -> HostWeightsError:
    text = (
        f"{folder} holds a {name}, which {library} {version(library)} does not have as a module; load it with a factory"
    )
    return error(Stage.PLANNING, Code.UNSUPPORTED, text, file=folder)


def _read_json(path: Path) -> Json:
    with open_regular(path) as (descriptor, status):
        if status.st_size > _MAX_JSON_BYTES:
            text = f"{path} has {status.st_size} bytes, more than the limit of {_MAX_JSON_BYTES}"
            raise error(Stage.SOURCE, Code.SOURCE_CORRUPT, text, file=path)
        with open(descriptor, "rb", closefd=False) as stream:
            content = stream.read(_MAX_JSON_BYTES)
    try:
        return msgspec.json.decode(content, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        text = f"{path} is no JSON object: {problem}"
        raise error(Stage.SOURCE, Code.SOURCE_CORRUPT, text, file=path) from problem
