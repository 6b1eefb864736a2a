"""How much memory this process and its mappings really take, as the kernel counts it."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .native import trim_heap

_KIB: Final = 1024
_NUMBER: Final = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Of a whole process: private memory without a file, and its proportional share of all its pages."""

    anonymous_bytes: int
    pss_bytes: int


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """Of the mappings of files in one directory: resident, proportional share, private clean, shared, anonymous."""

    rss_bytes: int = 0
    pss_bytes: int = 0
    private_clean_bytes: int = 0
    shared_bytes: int = 0
    anonymous_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Area:
    """One mapping of a process: its file (empty without one) and its counters in bytes, by the kernel's names."""

    path: str
    bytes_by_name: dict[str, int]


def process_memory() -> ProcessMemory:
    """Measure this process; raises OSError where the kernel does not tell."""
    (area,) = parse_smaps(Path("/proc/self/smaps_rollup").read_text(encoding="utf-8", errors="surrogateescape"))
    return ProcessMemory(area.bytes_by_name["Anonymous"], area.bytes_by_name["Pss"])


def mapped_memory(directory: str | Path, pid: int | None = None) -> MappedMemory:
    """Measure a process's mappings of files in a directory (at any depth, also of files removed since).

    ``pid`` None is this process. Raises OSError when there is no such process or it may not be looked at.
    """
    smaps = Path(f"/proc/{'self' if pid is None else pid}/smaps")
    areas = parse_smaps(smaps.read_text(encoding="utf-8", errors="surrogateescape"))
    return sum_areas(areas, os.path.realpath(directory))


def processes_mapping(directory: str | Path) -> list[int]:
    """Ids of the processes that map a file in a directory, as far as this user may look; ascending."""
    inside = _as_listed(os.path.realpath(directory))
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                maps = (process / "maps").read_text(encoding="utf-8", errors="surrogateescape")
                if inside in maps:
                    found.append(int(process.name))
    return sorted(found)


def trim() -> None:
    """Give free heap memory back to the system; does nothing where the C library cannot."""
    trim_heap()


def parse_smaps(text: str) -> list[Area]:
    """Parse the text of ``/proc/<pid>/smaps`` or ``smaps_rollup``; lines of an unknown form are skipped."""
    areas: list[Area] = []
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) >= 5 and "-" in fields[0] and not fields[0].endswith(":"):
            areas.append(Area(fields[5] if len(fields) > 5 else "", {}))
        elif areas and len(fields) == 3 and fields[2] == "kB" and _NUMBER.fullmatch(fields[1]):
            areas[-1].bytes_by_name[fields[0].removesuffix(":")] = int(fields[1]) * _KIB
    return areas


def sum_areas(areas: list[Area], directory: str) -> MappedMemory:
    """Add up the mappings of files in ``directory``, an absolute path without symbolic links."""
    inside = _as_listed(directory)
    chosen = [area.bytes_by_name for area in areas if area.path.startswith(inside)]

    def total(*names: str) -> int:
        return sum(counters.get(name, 0) for counters in chosen for name in names)

    return MappedMemory(
        rss_bytes=total("Rss"),
        pss_bytes=total("Pss"),
        private_clean_bytes=total("Private_Clean"),
        shared_bytes=total("Shared_Clean", "Shared_Dirty"),
        anonymous_bytes=total("Anonymous"),
    )


def _as_listed(directory: str) -> str:
    """How the kernel's lists of mappings begin the paths of a directory's files."""
    return directory.rstrip("/").replace("\n", "\\012") + "/"
