"""What a transformers configuration may not hold: entries by which the library would ask a hub, or read another file.

Read off transformers 5: ``configuration_utils`` (which file is the configuration), ``modeling_utils`` (which attention
is a kernel of a hub), ``backbone_utils`` (when a backbone's name is looked up), and timm's ``parse_model_name``.
"""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..messages.failure import Code, Stage, error

Json = Mapping[str, object]

_OTHER_FILES: Final = "configuration_files"
_IMPLEMENTATION: Final = "_implementation"
_FLASH: Final = re.compile(r"flash_attention_(\d)")
_FLASH_MODULES: Final = {"2": "flash_attn", "3": "flash_attn_interface", "4": "flash_attn.cute"}
_TIMM: Final = "timm_backbone"
_OWN_TIMM: Final = frozenset({"conditional_detr", "dab-detr", "deformable_detr", "detr", "table-transformer"})
"""Model types whose configurations take a name for timm's by themselves; all others look it up on a hub first."""


def refuse_hub(file: Path, config: Json, model_type: str) -> None:
    """Raise HostWeightsError(unsupported) for an entry by which ``model_type`` would take anything but ``file``."""
    if config.get(_OTHER_FILES):
        text = f"{file} names other files to take its place, {_OTHER_FILES}, which nobody has looked at"
        raise error(Stage.SOURCE, Code.UNSUPPORTED, f"{text}; take the entry out", file=file)
    for part, kind in _parts(config, model_type):
        if _asks_for_backbone(part, kind):
            text = (
                f"{file} names the backbone {part['backbone']}, which transformers would ask a hub for; that is never"
            )
            text += " done here: put the backbone's own configuration into backbone_config"
            raise error(Stage.SOURCE, Code.UNSUPPORTED, text, file=file)
        for name, value in part.items():
            for each in value.values() if isinstance(value, Mapping) else [value]:
                if _is_code_elsewhere(str(name), str(each)):
                    text = f"{file} names code to fetch and run, {name} {each}, which is never done here"
                    raise error(Stage.SOURCE, Code.UNSUPPORTED, f"{text}; take the entry out", file=file)


def _parts(config: Json, model_type: str) -> Iterator[tuple[Json, str | None]]:
    """The configuration and all within it, with the model type of those whose class is known."""
    waiting: list[tuple[object, str | None]] = [(config, model_type)]
    while waiting:
        found, kind = waiting.pop()
        if isinstance(found, list):
            waiting += [(each, None) for each in found]
        elif isinstance(found, Mapping):
            yield found, kind
            for name, value in found.items():
                is_backbone = name == "backbone_config" and isinstance(value, Mapping)
                waiting.append((value, str(value.get("model_type")) if is_backbone else None))


def _asks_for_backbone(part: Json, kind: str | None) -> bool:
    named = part.get("backbone")
    if not isinstance(named, str) or isinstance(part.get("backbone_config"), Mapping):
        return False
    if "/" in named or ":" in named:  # also timm asks a hub, for ``hf-hub:name``
        return True
    of_timm = kind in _OWN_TIMM and part.get("use_timm_backbone", True) is True and not part.get("backbone_kwargs")
    return not (of_timm or kind == _TIMM)


def _is_code_elsewhere(name: str, value: str) -> bool:
    if name == "architecture":  # timm's, of its wrapper
        return ":" in value
    if not name.endswith(_IMPLEMENTATION):
        return False
    flash = _FLASH.search(value)
    return "/" in value or (flash is not None and _is_flash_of_hub(flash[1]))


def _is_flash_of_hub(version: str) -> bool:
    """Where its own package is not installed and ``kernels`` is, transformers fetches that kernel."""
    return _installed("kernels") and not _installed(_FLASH_MODULES.get(version, ""))


def _installed(module: str) -> bool:
    try:
        return bool(module) and find_spec(module) is not None
    except (ImportError, ValueError):
        return False
