"""Keeping a store within its limits: reservations that all builders share, and collection that makes room.

Every change is made under one kernel lock that is held for moments. A reservation belongs to a staging directory and is
void as soon as nobody holds that directory's own lock, so nothing has to be given back and a crash costs nothing. A
published generation replaces its reservation by being found when the reservation has become void.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from ..messages.budget import Budget
from ..messages.config import CapacityPolicy
from ..messages.failure import Code, HostWeightsError, Stage, error
from .account import Account, Reservation, directory_bytes, last_lease_ns, load_account, save_account
from .catalog import is_condemned, is_pinned
from .domain import Workshop
from .filesystem import files
from .leftovers import Leftover, lock_idle, settle
from .locks import acquire, held, open_lock_file
from .removal import Victim
from .staging import sweep
from .store_files import Place, list_names, opened_within

_LOCK_NAME: Final = "capacity.lock"
Gone: TypeAlias = Victim | Leftover


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store takes: all generations, the condemned ones among them, and what builders have reserved.

    ``left_bytes`` of ``held_bytes`` are what downloads that were broken off left.
    """

    held_bytes: int
    condemned_bytes: int
    reserved_bytes: int
    generations: int
    left_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A generation as collection sees it."""

    key: str
    generation: str
    size_bytes: int
    condemned: bool
    pinned: bool
    last_lease_ns: int


def _bytes_of(account: Account, gone: Gone) -> int:
    return gone.size_bytes if isinstance(gone, Leftover) else account.holdings[gone.key, gone.generation]


def in_collection_order(candidates: list[Candidate]) -> list[Candidate]:
    """What may be collected, first the condemned, then by last lease; pinned ones only if they are condemned."""
    free = [candidate for candidate in candidates if candidate.condemned or not candidate.pinned]
    return sorted(free, key=lambda c: (not c.condemned, c.last_lease_ns, c.key, c.generation))


class Ledger:
    """The limits of one open store. Safe to use from any thread and from any number of processes."""

    def __init__(self, artifacts: Place, workshop: Workshop, policy: CapacityPolicy, wait_s: float) -> None:
        self._artifacts = artifacts
        self._workshop = workshop
        self._policy = policy
        self._wait_s = wait_s

    def check_artifact(self, key: str, payload_bytes: int) -> None:
        """Refuse an artifact that no state of the store could take: HostWeightsError(capacity_exceeded)."""
        limit = self._policy.max_artifact_bytes
        if limit is not None and payload_bytes > limit:
            raise error(
                Stage.CAPACITY,
                Code.CAPACITY_EXCEEDED,
                f"the artifact {key} takes {payload_bytes} bytes, max_artifact_bytes is {limit}; raise it",
                needed_bytes=payload_bytes,
                limit_bytes=limit,
            )

    def reserve(self, staged: Place, key: str, size_bytes: int, budget: Budget, *, resumes: str | None = None) -> None:
        """Reserve bytes for a locked staging directory, collecting what is in the way.

        Called under the key's build lock. What downloads left of the key goes, but for the one that the builder
        ``resumes``: that is part of what it reserves. Raises HostWeightsError: capacity_exceeded, having collected
        nothing, when that does not make enough room (retryable unless the limit is smaller than the artifact);
        domain_busy (retryable).
        """
        while not self._try_to_reserve(staged, key, size_bytes, budget, resumes):
            continue  # the disk was too full to note it; each turn collects something, or raises

    def _try_to_reserve(self, staged: Place, key: str, size_bytes: int, budget: Budget, resumes: str | None) -> bool:
        with ExitStack() as stack:
            with self._transaction(budget, reserving=staged.name) as account:
                resumed = account.leftovers.pop(resumes or "", None)
                received_bytes = 0 if resumed is None else resumed.size_bytes
                victims = self._make_room(account, key, size_bytes, received_bytes, stack)
                name = staged.name
                account.reservations[name] = Reservation(staging=name, key=key, size_bytes=size_bytes)
                # Their bytes are this builder's now: it writes nothing before they are deleted.
                self._move(account, victims, keep_bytes=False)
            for victim in victims:
                victim.delete(self._workshop.staging)
        if not account.saved and not victims:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._workshop.root.path))
        return account.saved

    def collect(self, max_store_bytes: int | None, budget: Budget) -> int:
        """Delete what downloads left, condemned generations, and others by last lease until all limits hold.

        Returns the bytes freed. ``max_store_bytes`` is a limit for this call, beside the store's own. Leased and pinned
        generations stay, and what somebody receives now.
        """
        with ExitStack() as stack:
            with self._transaction(budget) as account:
                account.recount(self._artifacts)
                limits = [x for x in (max_store_bytes, self._policy.max_store_bytes) if x is not None]
                too_much = self._shortage(account, 0, min(limits, default=None))
                left = self._lock_leftovers(account, None, stack)
                too_much -= sum(leftover.size_bytes for leftover in left)
                order = in_collection_order(self._candidates(account))
                condemned = sum(candidate.size_bytes for candidate in order if candidate.condemned)
                victims: list[Gone] = [*left, *self._lock_victims(order, condemned, too_much, stack)]
                freed = sum(_bytes_of(account, victim) for victim in victims)
                self._move(account, victims, keep_bytes=True)
            for victim in victims:
                victim.delete(self._workshop.staging)
        return freed

    def remove(self, key: str, generation: str, budget: Budget) -> int | None:
        """Delete one generation, also a pinned one; returns the bytes freed, None while anybody uses it.

        Raises FileNotFoundError when there is no such generation.
        """
        with ExitStack() as stack:
            with self._transaction(budget) as account:
                account.recount_key(self._artifacts, key)
                victim = Victim.lock(self._artifacts, key, generation)
                if victim is None:
                    return None
                stack.callback(victim.close)
                freed = account.holdings[key, generation]
                self._move(account, [victim], keep_bytes=True)
            victim.delete(self._workshop.staging)
        return freed

    def usage(self, budget: Budget) -> Usage:
        """What the store takes now, by its account."""
        with self._transaction(budget) as account:
            condemned = sum(c.size_bytes for c in self._candidates(account) if c.condemned)
            return Usage(
                account.held_bytes, condemned, account.reserved_bytes, len(account.holdings), account.left_bytes
            )

    @contextmanager
    def _transaction(self, budget: Budget, reserving: str = "") -> Iterator[Account]:
        """The account, true and locked for the block, saved at its end; without a reservation of ``reserving``."""
        path = self._workshop.locks.path_of(_LOCK_NAME)
        with open_lock_file(self._workshop.locks.fd, path, self._workshop.lock_mode) as lock:
            acquire(
                lock,
                path,
                exclusive=True,
                limit_s=self._wait_s,
                budget=budget,
                busy=held(Stage.CAPACITY, path),
            )
            account = load_account(self._workshop.root, self._artifacts, self._workshop.staging)
            account.reservations.pop(reserving, None)  # a lost account is counted anew from the staging directories
            self._settle(account)
            yield account
            self._save(account)

    def _save(self, account: Account) -> None:
        save_account(self._workshop.root, account, self._workshop.lock_mode)

    def _settle(self, account: Account) -> None:
        """Replace void reservations by what became of them: a generation, or nothing; count what downloads left."""
        staging = self._workshop.staging
        changed = {name.partition(".")[0] for name in sweep(staging)}
        living = set(list_names(staging))
        for name in [name for name in account.reservations if name not in living]:
            changed.add(account.reservations.pop(name).key)
        for key in sorted(changed):
            account.recount_key(self._artifacts, key)
        account.leftovers = settle(self._workshop, {each.key for each in account.reservations.values()})

    def _make_room(
        self, account: Account, key: str, size_bytes: int, received_bytes: int, stack: ExitStack
    ) -> list[Gone]:
        """What has to go for a builder of this key, locked: what downloads left first, generations for the rest."""
        limit = self._policy.max_store_bytes
        quota = self._policy.max_condemned_bytes
        left = self._leftovers_for(account, key, size_bytes, received_bytes, stack)
        left_bytes = sum(leftover.size_bytes for leftover in left)
        shortage = self._shortage(account, size_bytes, limit, received_bytes) - left_bytes
        if quota is None and shortage <= 0:
            return [*left]
        candidates = self._candidates(account)
        too_much_condemned = 0 if quota is None else sum(c.size_bytes for c in candidates if c.condemned) - quota
        if too_much_condemned <= 0 and shortage <= 0:
            return [*left]
        account.recount(self._artifacts)
        shortage = self._shortage(account, size_bytes, limit, received_bytes) - left_bytes
        order = in_collection_order(self._candidates(account))
        victims = self._lock_victims(order, too_much_condemned, shortage, stack)
        if sum(account.holdings[victim.key, victim.generation] for victim in victims) < shortage:
            raise self._refusal(account, size_bytes)
        return [*left, *victims]

    def _leftovers_for(
        self, account: Account, key: str, size_bytes: int, received_bytes: int, stack: ExitStack
    ) -> list[Leftover]:
        """What downloads left of the key, whose lock the builder holds, and of others what it needs, also of the disk.

        That goes without any limit too: a broken-off download may have filled the disk.
        """
        own = [each for each in account.leftovers.values() if each.key == key and each.movable]
        if len(own) == len(account.leftovers):
            return own
        shortage = max(
            self._shortage(account, size_bytes, self._policy.max_store_bytes, received_bytes),
            self._disk_shortage(account, size_bytes - received_bytes),
        )
        shortage -= sum(leftover.size_bytes for leftover in own)
        return own + self._lock_leftovers(account, shortage, stack, but_of=key)

    def _shortage(self, account: Account, size_bytes: int, limit: int | None, received_bytes: int = 0) -> int:
        """Bytes that have to go before ``size_bytes`` may come; 0 or less if none have to.

        ``received_bytes`` of them lie on the disk already, and in no account.
        """
        shortage = 0
        if limit is not None:
            shortage = account.held_bytes + account.reserved_bytes + size_bytes - limit
        if self._policy.min_free_bytes:
            shortage = max(shortage, self._disk_shortage(account, size_bytes - received_bytes))
        return shortage

    def _disk_shortage(self, account: Account, size_bytes: int) -> int:
        wanted = self._policy.min_free_bytes + size_bytes + self._outstanding_bytes(account)
        return wanted - self._free_bytes()

    def _free_bytes(self) -> int:
        found = files().fstatvfs(self._artifacts.fd)
        return found.f_bavail * found.f_frsize

    def _outstanding_bytes(self, account: Account) -> int:
        """What builders have reserved and not taken from the disk yet."""
        staging, total = self._workshop.staging, 0
        for name, reservation in account.reservations.items():
            with suppress(FileNotFoundError), opened_within(staging, name) as place:
                total += max(0, reservation.size_bytes - directory_bytes(place))
        return total

    def _candidates(self, account: Account) -> list[Candidate]:
        found: list[Candidate] = []
        for (key, generation), size_bytes in account.holdings.items():
            with (
                suppress(FileNotFoundError),
                opened_within(self._artifacts, key) as key_directory,
            ):
                condemned, pinned = is_condemned(key_directory, generation), is_pinned(key_directory)
                used_ns = last_lease_ns(self._artifacts, key, generation)
                found.append(Candidate(key, generation, size_bytes, condemned, pinned, used_ns))
        return found

    def _lock_leftovers(
        self, account: Account, wanted_bytes: int | None, stack: ExitStack, but_of: str | None = None
    ) -> list[Leftover]:
        """Lock what downloads left, and nobody goes on with now, until enough bytes are found; all of it for None."""
        found: list[Leftover] = []
        found_bytes = 0
        locked: set[str] = set()
        for name, leftover in account.leftovers.items():
            if wanted_bytes is not None and found_bytes >= wanted_bytes:
                break
            if leftover.key == but_of or not leftover.movable:
                continue
            if leftover.key not in locked:
                lock = lock_idle(self._workshop, name)
                if lock is None:
                    continue
                stack.callback(lock.close)
                locked.add(leftover.key)
            found.append(leftover)
            found_bytes += leftover.size_bytes
        return found

    def _lock_victims(
        self, order: list[Candidate], condemned_bytes: int, shortage: int, stack: ExitStack
    ) -> list[Victim]:
        """Lock generations in this order until enough bytes are found; their locks end with ``stack``.

        ``condemned_bytes`` only condemned ones can pay for: sound ones go for the shortage alone.
        """
        victims: list[Victim] = []
        found_bytes = 0
        for candidate in order:
            if found_bytes >= (max(condemned_bytes, shortage) if candidate.condemned else shortage):
                continue
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                victim = Victim.lock(self._artifacts, candidate.key, candidate.generation)
                if victim is not None:
                    stack.callback(victim.close)
                    victims.append(victim)
                    found_bytes += candidate.size_bytes
        return victims

    def _move(self, account: Account, gone: Sequence[Gone], *, keep_bytes: bool) -> None:
        """Take things away; ``keep_bytes`` keeps their bytes reserved until they are deleted.

        The account is saved first: a crash before a rename leaves a void reservation, whose key is then counted anew.
        """
        for each in gone:
            size_bytes = _bytes_of(account, each)
            account.reservations[each.trash] = Reservation(
                staging=each.trash, key=each.key, size_bytes=size_bytes if keep_bytes else 0
            )
            if isinstance(each, Leftover):
                del account.leftovers[each.name]
            else:
                del account.holdings[each.key, each.generation]
        if gone:
            self._save(account)
        for each in gone:
            each.move(self._workshop.root if isinstance(each, Leftover) else self._artifacts, self._workshop.staging)

    def _refusal(self, account: Account, size_bytes: int) -> HostWeightsError:
        policy, free_bytes = self._policy, self._free_bytes()
        condemned = sum(c.size_bytes for c in self._candidates(account) if c.condemned)
        limit = policy.max_store_bytes
        text = (
            f"{size_bytes} bytes are needed; the store holds {account.held_bytes} ({condemned} of them condemned), "
            f"builders have reserved {account.reserved_bytes}, max_store_bytes is {limit}, {free_bytes} are free, "
            f"min_free_bytes is {policy.min_free_bytes}; what else could go is leased, pinned or another user's: "
            "release, unpin or remove generations, or raise the limit"
        )
        return error(
            Stage.CAPACITY,
            Code.CAPACITY_EXCEEDED,
            text,
            retryable=limit is None or size_bytes <= limit,
            needed_bytes=size_bytes,
            held_bytes=account.held_bytes,
            condemned_bytes=condemned,
            reserved_bytes=account.reserved_bytes,
            limit_bytes=limit,
            free_bytes=free_bytes,
        )
