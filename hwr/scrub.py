"""Reading a whole store in the background, to find damage before a worker does."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..messages.budget import Budget
from ..messages.config import Validation
from ..messages.failure import Code, HostWeightsError, Stage, error
from . import catalog
from .acquisition import Gone, Search, lease_generation
from .contract import Progress
from .json_records import NewerSchema
from .lease import ArtifactLease
from .native import idle_io_priority
from .store_files import Damage, Place, list_names, opened_within
from .upkeep import missing
from .validation import read_records

_PROVEN = {Code.CHECKSUM_MISMATCH, Code.PAYLOAD_MISMATCH, Code.MANIFEST_CORRUPT}

Condemn = Callable[[str, str, Code, str], None]
"""Called with key, generation, code and reason of what was found damaged."""

Reading = Callable[[str, str, int, int], None]
"""Called with key, generation, bytes read and bytes in all; quick."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One damaged generation."""

    directory: Path
    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What a scrub read: sound generations and their bytes, damaged ones, and what it could not read or condemn."""

    sound: int
    sound_bytes: int
    damaged: tuple[Finding, ...]
    unread: tuple[str, ...]


def scrub(
    artifacts: Place, condemn: Condemn, wait_s: float, budget: Budget, reading: Reading | None = None
) -> ScrubReport:
    """Compare every byte of every generation that is not condemned with its digest, at idle I/O priority.

    Each generation is leased while it is read; that does not count as a use. Bytes that are in the page cache are
    compared as they are there, the others as the disk gives them. Damage is condemned; what cannot be read now, or was
    written by a newer version, is reported and condemns nothing. Raises what the budget raises, and OSError when the
    store itself cannot be listed.
    """
    sound, sound_bytes = 0, 0
    damaged: list[Finding] = []
    unread: list[str] = []
    with idle_io_priority():
        for key in catalog.list_keys(list_names(artifacts)):
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                opened_within(artifacts, key) as key_directory,
            ):
                for generation in catalog.list_generations(list_names(key_directory)):
                    if generation.condemned:
                        continue
                    progress = None if reading is None else partial(reading, key, generation.name)
                    result = _check(key_directory, generation.name, wait_s, budget, progress)
                    if isinstance(result, int):
                        sound, sound_bytes = sound + 1, sound_bytes + result
                    elif isinstance(result, Finding):
                        damaged.append(result)
                        try:
                            condemn(key, generation.name, result.code, result.reason)
                        except HostWeightsError as failure:
                            unread.append(str(failure))
                    elif result is not None:
                        unread.append(result)
    return ScrubReport(sound, sound_bytes, tuple(damaged), tuple(unread))


def verify(
    artifacts: Place, key: str, generation: str, wait_s: float, budget: Budget, progress: Progress | None = None
) -> int:
    """Compare every byte of one generation, condemned or not, with its digest; returns the bytes that were read.

    Changes nothing. Raises HostWeightsError: artifact_missing; checksum_mismatch, payload_mismatch or manifest_corrupt
    for damage; manifest_incompatible for a newer version's; what the budget raises. OSError for what cannot be read.
    """
    directory = artifacts.path_of(key, generation)
    try:
        with opened_within(artifacts, key) as key_directory:
            lease = _lease(key_directory, generation, wait_s, budget, condemned=True)
            try:
                lease.verify(budget, progress)
            finally:
                lease.close()
    except (Gone, FileNotFoundError, NotADirectoryError):
        raise missing(directory) from None
    except Damage as damage:
        raise error(Stage.VALIDATION, damage.code, damage.reason, directory=directory) from damage
    except NewerSchema as newer:
        raise error(Stage.VALIDATION, Code.MANIFEST_INCOMPATIBLE, f"{newer}; upgrade hostweights") from newer
    return sum(file.size_bytes for file in lease.manifest.files)


def _check(
    key_directory: Place, generation: str, wait_s: float, budget: Budget, progress: Progress | None
) -> int | Finding | str | None:
    """The bytes that were read and right; or what is wrong; or why it could not be read; None if it is gone."""
    directory = key_directory.path_of(generation)
    budget.check()
    try:
        lease = _lease(key_directory, generation, wait_s, budget)
        try:
            lease.verify(budget, progress)
        finally:
            lease.close()
    except (Gone, FileNotFoundError, NotADirectoryError):
        return None
    except Damage as damage:
        return Finding(Path(directory), damage.code, damage.reason)
    except (NewerSchema, OSError) as problem:
        return f"{directory}: {problem}"
    except HostWeightsError as failure:
        if failure.code in _PROVEN:
            return Finding(Path(directory), failure.code, str(failure))
        budget.check()
        return str(failure)
    return sum(file.size_bytes for file in lease.manifest.files)


def _lease(
    key_directory: Place, generation: str, wait_s: float, budget: Budget, *, condemned: bool = False
) -> ArtifactLease:
    key = key_directory.name
    with (
        opened_within(key_directory, generation) as place,
        catalog.open_ready(place) as ready,
    ):
        _, manifest = read_records(place, ready.fd, key)
    search = Search(
        key=key,
        identity=manifest.identity,
        validation=Validation.METADATA,
        lease_id="scrub",
        wait_s=wait_s,
        may_write=False,
        condemned=condemned,
    )
    return lease_generation(key_directory, generation, search, budget)
