"""What must hold in a simulation: after every step, when a worker ends, and at the end of the host.

A new rule is a method of ``Rules`` that calls ``broken``, and a line where it is asked.
"""

from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from weakref import WeakSet

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from hostweights.hwr.lease import ArtifactLease
from hostweights.messages.manifest import Manifest, ReadyMarker
from sim_fibers import Broken, Process, Sim
from sim_files import SimFiles
from sim_models import sources
from sim_nodes import DataNode, NameNode

if TYPE_CHECKING:
    from sim_client import Worker

_LONGEST_S = 3 * 3600.0
_MOST_STEPS = 100_000
_SOUND: dict[bytes, bool] = {}
"""Payloads that were compared with the checkpoints, in any seed, and whether they are right."""


class Rules:
    """The invariants of one host."""

    def __init__(self, sim: Sim, files: SimFiles) -> None:
        self._sim = sim
        self._files = files
        self._seen: dict[int, int] = {}
        self._leases: WeakSet[ArtifactLease] = WeakSet()
        self.rotten = False
        """A synced payload came back wrong after a power failure, so that not everything on the disk is sound."""
        self.condemned: set[str] = set()
        """Generations that somebody condemned on purpose."""
        self.workers: list[Worker] = []
        sim.after_step = self.after_step
        files.built = self.one_builder

    def broken(self, rule: str, facts: object = "") -> None:
        """A rule is broken: the run ends."""
        self._sim.fail(Broken(f"{rule}: {facts}" if facts else rule))

    # --- after every step -------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """What is asked at every step."""
        sim = self._sim
        if sim.loop.time() > _LONGEST_S or sim.steps > _MOST_STEPS:
            self.broken("virtual time is bounded", f"{sim.loop.time():.0f} s, {sim.steps} steps")
        if self._files.changed:
            self._files.changed = False
            self._whole_or_absent()
        self._leases_are_sound()

    def _whole_or_absent(self) -> None:
        """Whatever generation can be seen is complete and right."""
        artifacts = self._files.find("/simulated-host/store/artifacts")
        if not isinstance(artifacts, NameNode):
            return
        for key, directory in artifacts.names.items():
            if isinstance(directory, NameNode):
                for name, generation in directory.names.items():
                    if isinstance(generation, NameNode) and "READY.json" in generation.names:
                        self._look_at(f"{key}/{name}", generation)
                    elif name.endswith(".condemned.json"):
                        self._rightly_condemned(key, name.removesuffix(".condemned.json"))

    def _look_at(self, name: str, generation: NameNode) -> None:
        versions = sum(node.version + 1 for node in generation.names.values() if isinstance(node, DataNode))
        if self._seen.get(generation.ino) == versions:
            return
        self._seen[generation.ino] = versions
        if not self.rotten and (problem := _why_not_whole(generation)) is not None:
            self.broken("an artifact is absent or whole", f"{name} can be seen, and {problem}")

    def _rightly_condemned(self, key: str, generation: str) -> None:
        if not self.rotten and f"{key}/{generation}" not in self.condemned:
            self.broken("a sound generation is not condemned", f"{key}/{generation}")

    def _leases_are_sound(self) -> None:
        """Whoever was given a lease reads the right bytes."""
        for worker in self.workers:
            for entry in worker.host._assembly.resources.leases.all():
                lease = entry.lease
                if isinstance(lease, ArtifactLease) and lease not in self._leases and not lease.closed:
                    self._leases.add(lease)
                    for mapping in lease._mapping.files().values():
                        if not _sound(bytes(mapping.view)):
                            self.broken("a reader sees right bytes", mapping.path)

    def one_builder(self, directory: NameNode, process: Process) -> None:
        """A payload file was made in a staging directory: nobody else builds that key now."""
        directory.built = True
        staging = self._files.find("/simulated-host/store/staging")
        assert isinstance(staging, NameNode)
        name = next(name for name, node in staging.names.items() if node is directory)
        key = name.partition(".")[0]
        for other, node in staging.names.items():
            if other.startswith(key) and node is not directory and isinstance(node, NameNode) and node.built:
                for opened in node.lockers:
                    self.broken("one builder of a key", f"{opened.process.name} and {process.name} build {key}")

    def why_not_held(self, worker: "Worker", address: int) -> str | None:
        """Why a driver must not read at an address; None while it is mapped, and held by who streams."""
        if not self._files.is_mapped(address, worker):
            return "it is not mapped any more"
        for entry in worker.host._assembly.resources.leases.all():
            if isinstance(entry.lease, ArtifactLease) and _maps(entry.lease, address):
                holders = [name for name in entry.lease._holders if not name.startswith("model ")]
                return None if holders else f"only {list(entry.lease._holders)} hold lease {entry.lease.lease_id}"
        return "its lease is closed"

    # --- at an end --------------------------------------------------------------------------------------------------

    def nothing_left(self, process: Process) -> None:
        """A process that ended in good order holds nothing."""
        held = [opened.path for opened in self._files.opened.values() if opened.process is process]
        if held:
            self.broken("no lease, lock or descriptor is leaked", f"{process.name} has {held}")
        if process.fibers:
            self.broken("every thread is owned", [fiber.name for fiber in process.fibers])


def _why_not_whole(generation: NameNode) -> str | None:
    """What is wrong with a generation that can be seen; None if it is whole."""
    try:
        ready = msgspec.json.decode(_bytes_of(generation, "READY.json"), type=ReadyMarker)
        manifest = msgspec.json.decode(_bytes_of(generation, "manifest.json"), type=Manifest)
    except (msgspec.DecodeError, KeyError) as problem:
        return f"its records are not: {problem}"
    if ready.key != manifest.key:
        return "its records do not fit"
    for file in manifest.files:
        if file.name not in generation.names or not _sound(_bytes_of(generation, file.name)):
            return f"{PurePosixPath(file.name)} is wrong"
    return None


def _maps(lease: ArtifactLease, address: int) -> bool:
    """Whether an address lies in the pages that a lease maps for a driver."""
    views = [mapping._bytes for mapping in lease._mapping.files().values()]
    return any(view.data_ptr() <= address < view.data_ptr() + view.numel() for view in views)


def _bytes_of(directory: NameNode, name: str) -> bytes:
    node = directory.names[name]
    assert isinstance(node, DataNode)
    return bytes(node.file.data)


def _sound(payload: bytes) -> bool:
    """Whether a payload file holds the tensors of one of the checkpoints."""
    if payload not in _SOUND:
        _SOUND[payload] = _is_sound(payload)
    return _SOUND[payload]


def _is_sound(payload: bytes) -> bool:
    try:
        tensors = load_tensors(payload)
    except (SafetensorError, ValueError):
        return False
    held = {name: value.numpy().tobytes() for name, value in tensors.items() if name in sources()[0].tensors}
    return any(held == source.tensors for source in sources())
