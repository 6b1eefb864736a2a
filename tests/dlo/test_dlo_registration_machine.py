"""Registration against a driver that keeps books: any order of waiting, refusals, failing unregisters and closing."""

import mmap

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cuda_fake import DriverError, FakeCuda, fake_device
from hostweights.dlo.chunks import HostRange
from hostweights.dlo.headroom import LockLimit
from hostweights.dlo.ledger import Ledger
from hostweights.dlo.registration import _KEPT, BlockState, Registration
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.transport import RegistrationPolicy

PAGE = mmap.PAGESIZE
FILE = "/proc/self/exe"  # readable, and nobody's payload


class RegistrationMachine(RuleBasedStateMachine):
    """Several registrations over one driver and one ledger; the model is which of them should still hold pages."""

    @initialize()
    def begin(self) -> None:
        self.driver = FakeCuda()
        self.memory = fake_device(self.driver).host_memory()
        self.ledger = Ledger()
        self.open: list[Registration] = []
        self.unsafe: list[Registration] = []
        self.next_page = 1000
        self.refuse_from: int | None = None
        self.keeps_pages = False
        self.driver.on_register = self.on_register
        self.driver.on_unregister = self.on_unregister

    def on_register(self, _address: int, size_bytes: int) -> None:
        held = sum(self.driver.registered.values())
        if self.refuse_from is not None and held + size_bytes > self.refuse_from:
            raise DriverError("out of memory")

    def on_unregister(self, _address: int) -> None:
        if self.keeps_pages:
            raise DriverError("busy")

    @rule(
        pages=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        budget_pages=st.none() | st.integers(0, 8),
        room_pages=st.none() | st.integers(0, 8),
        per_chunk=st.integers(1, 4),
    )
    def start(self, pages: list[int], budget_pages: int | None, room_pages: int | None, per_chunk: int) -> None:
        ranges = []
        for count in pages:
            ranges.append(HostRange(self.next_page * PAGE, count * PAGE, FILE))
            self.next_page += count
        budget_bytes = None if budget_pages is None else budget_pages * PAGE
        made = Registration(
            self.memory,
            ranges,
            object(),
            RegistrationPolicy(budget_bytes=budget_bytes),
            ledger=self.ledger,
            chunk_bytes=per_chunk * PAGE,
            headroom=lambda: None if room_pages is None else room_pages * PAGE,
            locks=lambda: LockLimit(None, 0),
        )
        before_bytes = sum(self.driver.registered.values())
        made.start()
        self.open.append(made)
        for block, count in enumerate(pages):
            while made.worth_waiting(block):
                made.await_block(block)
            state = made.use(block)
            assert state is not BlockState.PENDING
            assert count or state is BlockState.REFUSED
        thread = made._thread
        if thread is not None:
            thread.join()
        info = made.info()
        taken_bytes = sum(self.driver.registered.values()) - before_bytes
        assert info.registered_bytes == taken_bytes
        assert budget_bytes is None or taken_bytes <= budget_bytes
        assert room_pages is None or taken_bytes <= room_pages * PAGE
        assert self.refuse_from is None or taken_bytes == 0 or before_bytes + taken_bytes <= self.refuse_from
        assert (info.state == "complete") is (taken_bytes == info.wanted_bytes and not info.reason)
        assert info.reason or taken_bytes == info.wanted_bytes

    @rule(pages=st.none() | st.integers(0, 12))
    def driver_refuses_from(self, pages: int | None) -> None:
        self.refuse_from = None if pages is None else pages * PAGE

    @rule(keeps=st.booleans())
    def driver_keeps_pages(self, keeps: bool) -> None:
        self.keeps_pages = keeps

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 20))
    def close(self, which: int) -> None:
        self.end(self.open.pop(which % len(self.open)))

    @precondition(lambda self: self.unsafe)
    @rule(which=st.integers(0, 20))
    def close_again(self, which: int) -> None:
        self.end(self.unsafe.pop(which % len(self.unsafe)))

    def end(self, registration: Registration) -> None:
        held = bool(registration.info().registered_bytes)
        if held and self.keeps_pages:
            with pytest.raises(HostWeightsError) as kept:
                registration.close()
            assert kept.value.code is Code.UNREGISTER_FAILED
            assert kept.value.failure.retryable
            assert registration.info().state == "unsafe"
            self.unsafe.append(registration)
            return
        registration.close()
        registration.close()
        assert registration.info().registered_bytes == 0
        assert registration.info().state == "closed"
        assert registration not in _KEPT
        assert registration._keep is None

    @invariant()
    def the_driver_holds_what_open_registrations_say(self) -> None:
        if not hasattr(self, "driver"):
            return
        living = [*self.open, *self.unsafe]
        assert sum(self.driver.registered.values()) == sum(each.info().registered_bytes for each in living)
        for each in living:
            assert (each in _KEPT) is (each.info().registered_bytes > 0)
            assert each._keep is not None

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.keeps_pages = False
            for registration in [*self.open, *self.unsafe]:
                registration.close()
            assert not self.driver.registered


RegistrationMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestT46TheDriverHoldsWhatRegistrationsSay = RegistrationMachine.TestCase
