"""Looking at a store and looking after it; blocking, for commands and scripts."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..hwr.budget import PlainBudget
from ..hwr.capacity import Usage
from ..hwr.domain import RECORD_NAME
from ..hwr.identity import why
from ..hwr.lock_holders import process_name
from ..hwr.memory import mapped_memory, processes_mapping
from ..hwr.packed.logical import logical_tensors
from ..hwr.scrub import Reading
from ..hwr.store import LocalStore
from ..hwr.store_files import os_errors
from ..hwr.upkeep import StoredGeneration
from ..messages.base import Count, Digest, Generation, Name, Record, Seconds, SizeBytes, Text
from ..messages.config import WaitPolicy
from ..messages.dtypes import ITEM_SIZE_BYTES
from ..messages.failure import Code, HostWeightsError, Stage, error, printable
from ..messages.identity import ArtifactIdentity
from ..messages.manifest import Manifest
from ..messages.packed import PART_MARK

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Holder(Record, frozen=True, kw_only=True):
    """A process that maps a generation; ``pss_bytes`` is its share of the pages, None where this user may not look."""

    pid: Count
    name: Text
    pss_bytes: SizeBytes | None


class Entry(Record, frozen=True, kw_only=True):
    """One generation. ``model`` and ``component`` are empty when its records cannot be read; ``problem`` says why.

    ``condemned`` is code and reason, None for one that is not. ``leased`` is True while any process holds a lease,
    also one whose mapping this user may not see.
    """

    key: Digest
    generation: Generation
    model: Text
    component: Text
    directory: Text
    size_bytes: SizeBytes
    condemned: Text | None
    problem: Text | None
    pinned: bool
    leased: bool
    last_lease_s: Seconds
    holders: tuple[Holder, ...]


class StoreState(Record, frozen=True, kw_only=True):
    """A store as a whole; ``reserved_bytes`` is what builders may still come to take.

    ``left_bytes`` is what broken-off downloads left. Both are None where the account cannot be settled now: in a
    read-only store, or when another process keeps it locked.
    """

    root: Text
    domain_id: Name
    filesystem: Text
    read_only: bool
    held_bytes: SizeBytes
    condemned_bytes: SizeBytes
    reserved_bytes: SizeBytes | None
    left_bytes: SizeBytes | None
    free_bytes: SizeBytes
    entries: tuple[Entry, ...]


class PackedContents(Record, frozen=True, kw_only=True):
    """What of a generation is stored packed: so many tensors of ``plain_bytes``, in parts of ``packed_bytes``.

    ``widths`` counts the tensors by the bits of their exponent codes; ``escapes`` are elements whose exponent has no
    code.
    """

    codec: Name
    codec_version: Count
    tensors: Count
    plain_bytes: SizeBytes
    packed_bytes: SizeBytes
    widths: dict[str, Count]
    elements: Count
    escapes: Count


class Contents(Record, frozen=True, kw_only=True):
    """What one generation holds."""

    entry: Entry
    identity: ArtifactIdentity
    publication_id: Name
    content: Digest
    tensors: Count
    aliases: Count
    blocks: Count
    files: Count
    packed: PackedContents | None = None


class DifferingField(Record, frozen=True, kw_only=True):
    """A field of the identity that made two keys differ."""

    path: Text
    left: Text
    right: Text


class Scrubbed(Record, frozen=True, kw_only=True):
    """What a scrub found; damaged ones are condemned now unless the store is read-only."""

    sound: Count
    sound_bytes: SizeBytes
    damaged: tuple[Text, ...]
    unread: tuple[Text, ...]


class Upkeep:
    """One open store. Every call raises HostWeightsError."""

    def __init__(self, store: LocalStore, budget: PlainBudget) -> None:
        self._store = store
        self._budget = budget

    def state(self) -> StoreState:
        """Everything there is. Changes no artifact; settles the account of a store that can be written."""
        store, entries = self._store, tuple(self._entry(stored) for stored in self._store.list_stored())
        free = os.statvfs(store.root)
        usage = self._usage()
        return StoreState(
            root=printable(str(store.root)),
            domain_id=store.domain_id,
            filesystem=store.filesystem,
            read_only=store.read_only,
            held_bytes=sum(entry.size_bytes for entry in entries),
            condemned_bytes=sum(entry.size_bytes for entry in entries if entry.condemned is not None),
            reserved_bytes=None if usage is None else usage.reserved_bytes,
            left_bytes=None if usage is None else usage.left_bytes,
            free_bytes=free.f_bavail * free.f_frsize,
            entries=entries,
        )

    def of_key(self, prefix: str) -> tuple[StoredGeneration, ...]:
        """The generations of the one key that begins so, newest first.

        Raises artifact_missing when there is none, and invalid_config when several keys begin so.
        """
        found = [stored for stored in self._store.list_stored() if prefix and stored.key.startswith(prefix)]
        keys = sorted({stored.key for stored in found})
        if not keys:
            text = f"no key in {self._store.root} begins with {prefix!r}; list them with: hostweights list"
            raise error(Stage.LOOKUP, Code.ARTIFACT_MISSING, text)
        if len(keys) > 1:
            text = f"{prefix!r} begins {len(keys)} keys: {', '.join(key[:16] for key in keys[:8])}; write more digits"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
        return tuple(found)

    def contents(self, prefix: str) -> tuple[Contents, ...]:
        """What every readable generation of a key holds; raises what its newest is damaged by when none is."""
        found: list[Contents] = []
        problems: list[HostWeightsError] = []
        for stored in self.of_key(prefix):
            try:
                found.append(self._contents(stored))
            except HostWeightsError as problem:
                problems.append(problem)
        if not found:
            raise problems[0]
        return tuple(found)

    def why(self, left: str, right: str) -> tuple[DifferingField, ...]:
        """The fields that made two keys differ."""
        one, other = self.contents(left)[0].identity, self.contents(right)[0].identity
        return tuple(DifferingField(path=d.path, left=d.left, right=d.right) for d in why(one, other))

    def verify(self, stored: StoredGeneration, progress: Progress | None = None) -> int:
        """Compare every byte with its digest; returns the bytes read, changes nothing."""
        return self._store.verify(stored.key, stored.generation, self._budget, progress)

    def stored(self) -> tuple[StoredGeneration, ...]:
        """Every generation, by key, newest first."""
        return tuple(self._store.list_stored())

    def scrub(self, reading: Reading | None = None) -> Scrubbed:
        """Compare every byte of everything at idle I/O priority; condemn what is damaged."""
        report = self._store.scrub(self._budget, reading)
        damaged = tuple(printable(f"{each.directory}: {each.code}: {each.reason}") for each in report.damaged)
        return Scrubbed(
            sound=report.sound,
            sound_bytes=report.sound_bytes,
            damaged=damaged,
            unread=tuple(printable(text) for text in report.unread),
        )

    def collect(self, max_store_bytes: int | None) -> int:
        """Delete condemned generations, and others by last lease down to a limit; returns the bytes freed."""
        return self._store.collect(self._budget, max_store_bytes)

    def remove(self, stored: StoredGeneration) -> int:
        """Delete one generation; returns the bytes freed."""
        return self._store.remove(stored.key, stored.generation, self._budget)

    def _usage(self) -> Usage | None:
        if self._store.read_only:
            return None
        try:
            return self._store.usage(self._budget)
        except HostWeightsError as failed:
            if failed.code is Code.DOMAIN_BUSY:
                return None
            raise

    def _entry(self, stored: StoredGeneration) -> Entry:
        model, component, condemned, problem = "", "", "" if stored.condemned else None, None
        try:
            found = self._store.describe(stored.key, stored.generation)
            identity = found.manifest.identity
            model, component, condemned = identity.source.model, identity.component.name, found.condemned
        except HostWeightsError as unreadable:
            problem = str(unreadable)
        return Entry(
            key=stored.key,
            generation=stored.generation,
            model=model,
            component=component,
            directory=printable(stored.path),
            size_bytes=stored.size_bytes,
            condemned=condemned,
            problem=problem,
            pinned=stored.pinned,
            leased=stored.leased,
            last_lease_s=stored.last_lease_s,
            holders=_holders(stored.path) if stored.leased else (),
        )

    def _contents(self, stored: StoredGeneration) -> Contents:
        found = self._store.describe(stored.key, stored.generation)
        manifest = found.manifest
        return Contents(
            entry=self._entry(stored),
            identity=manifest.identity,
            publication_id=found.ready.publication_id,
            content=manifest.content,
            tensors=len(logical_tensors(manifest)),
            aliases=len(manifest.aliases),
            blocks=len(manifest.blocks),
            files=len(manifest.files),
            packed=_packed(manifest),
        )


def _packed(manifest: Manifest) -> PackedContents | None:
    if not manifest.packed:
        return None
    stored = manifest.identity.representation
    return PackedContents(
        codec=stored.codec,
        codec_version=stored.codec_version,
        tensors=len(manifest.packed),
        plain_bytes=sum(entry.size_bytes for entry in manifest.packed),
        packed_bytes=sum(entry.size_bytes for entry in manifest.tensors if entry.name.startswith(PART_MARK)),
        widths={str(width): count for width, count in sorted(Counter(each.width for each in manifest.packed).items())},
        elements=sum(entry.size_bytes // ITEM_SIZE_BYTES[entry.dtype] for entry in manifest.packed),
        escapes=sum(entry.escapes for entry in manifest.packed),
    )


@contextmanager
def existing_store(root: Path, budget: PlainBudget | None = None) -> Iterator[Upkeep]:
    """Open a store that is there, for the block; nothing is made.

    Raises domain_unavailable for a directory that holds no store, and what opening one raises.
    """
    place = root.absolute()
    require_store(place)
    used = budget or PlainBudget()
    store = LocalStore.open(place, WaitPolicy(), used)
    try:
        yield Upkeep(store, used)
    finally:
        store.close()


def require_store(place: Path) -> None:
    """Raise domain_unavailable for a directory that holds no store."""
    with os_errors(Stage.DOMAIN, f"look into {place}"), suppress(PermissionError):
        if not (place / RECORD_NAME).exists():
            what = "holds no store (it has no domain.json)" if place.is_dir() else "is no directory"
            text = f"{place} {what}; expected a root that was published into, as by: hostweights warm"
            raise error(Stage.DOMAIN, Code.DOMAIN_UNAVAILABLE, text)


def _holders(directory: str) -> tuple[Holder, ...]:
    found: list[Holder] = []
    for pid in processes_mapping(directory):
        pss_bytes = None
        with suppress(OSError):
            pss_bytes = mapped_memory(directory, pid).pss_bytes
        found.append(Holder(pid=pid, name=process_name(pid), pss_bytes=pss_bytes))
    return tuple(found)
