"""Which processes of this host are there, by the host's own account: to say which rank was lost, not to decide it."""

import hashlib
import os
from pathlib import Path
from typing import Final

Presence = tuple[int, int, int]
"""Host and process namespace as one number, process, and when it started by the host's clock; zeros: unknown."""

_EXITING: Final = 0x4
"""The kernel's flag of a process that is ending: its connections may close before it is gone."""


def own_presence() -> Presence:
    """Of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = Path("/proc/self/ns/pid").readlink()
        digest = hashlib.sha256(f"{boot} {space}".encode()).digest()
        return int.from_bytes(digest[:7], "big"), os.getpid(), int(_stat(os.getpid())[19])
    except (OSError, ValueError):
        return 0, 0, 0


def why_absent(other: Presence) -> str | None:
    """``has ended`` or ``is stopped``; None for one that runs, and for one of another host, who cannot be asked."""
    host, process, started = other
    if not host or host != own_presence()[0]:
        return None
    try:
        state, flags, began = (_stat(process)[index] for index in (0, 6, 19))
    except (OSError, ValueError):
        return "has ended"
    if int(began) != started or state in "ZX" or int(flags) & _EXITING:
        return "has ended"
    return "is stopped" if state in "Tt" else None


def _stat(process: int) -> list[str]:
    """The fields behind the name, which may hold anything."""
    text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    return text[text.rindex(")") + 1 :].split()
