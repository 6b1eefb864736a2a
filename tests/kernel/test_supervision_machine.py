"""Supervision as pure decisions, against a model that counts crashes: intensity, pauses, escalation, restart order."""

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hostweights.actors.kernel import RestartPolicy, Strategy
from hostweights.actors.kernel.supervision import Escalate, Record, Restart, Stop, decide, to_restart


class TransientError(OSError):
    """A declared fault, of a class below the declared one."""


class SupervisionMachine(RuleBasedStateMachine):
    """The model: when the actor crashed, and until when its last restart pauses."""

    @initialize(
        limit=st.integers(1, 5),
        window_s=st.floats(1.0, 60.0),
        backoff_s=st.floats(0.0, 2.0),
        backoff_limit_s=st.floats(0.0, 10.0),
    )
    def begin(self, limit: int, window_s: float, backoff_s: float, backoff_limit_s: float) -> None:
        self.policy = RestartPolicy(
            limit=limit,
            window_s=window_s,
            backoff_s=backoff_s,
            backoff_limit_s=backoff_limit_s,
            restart_on=(OSError,),
        )
        self.record = Record()
        self.now_s = 0.0
        self.crashes_s: list[float] = []
        self.pause_s: float | None = None
        self.restarts_s: list[float] = []

    def decided(self, crash: Exception, record: Record) -> Restart | Stop | Escalate:
        self.record, decision = decide(self.policy, record, crash, self.now_s)
        self.crashes_s.append(self.now_s)
        assert not self.record.cleanup_failed, "the next incarnation starts with clean hands"
        return decision

    def recent(self) -> int:
        return sum(self.now_s - at < self.policy.window_s for at in self.crashes_s)

    @rule(seconds=st.floats(0.0, 90.0))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(crash=st.sampled_from([OSError("gone"), TransientError("gone")]))
    def crash(self, crash: Exception) -> None:
        decision = self.decided(crash, self.record)
        recent = self.recent()
        if recent > self.policy.limit:
            assert isinstance(decision, Escalate)
            assert f"{recent} times" in decision.why
            self.start_anew()
            return
        assert isinstance(decision, Restart)
        assert 0.0 <= decision.after_s <= self.policy.backoff_limit_s
        if recent == 1:
            assert decision.after_s == min(self.policy.backoff_s, self.policy.backoff_limit_s)
        elif self.pause_s is not None and recent == len(self.record.crashes_s) > self.before:
            assert decision.after_s >= self.pause_s, "pauses grow while crashes do not end"
        self.before, self.pause_s = recent, decision.after_s
        self.restarts_s.append(self.now_s)

    before = 0

    @rule(crash=st.sampled_from([ValueError("bug"), ZeroDivisionError("bug"), KeyError("bug")]))
    def bug(self, crash: Exception) -> None:
        decision = self.decided(crash, self.record)
        assert isinstance(decision, Escalate)
        assert type(crash).__name__ in decision.why
        self.start_anew()

    @rule(declared=st.booleans(), stopping=st.booleans())
    def clean_up_fails(self, declared: bool, stopping: bool) -> None:
        crash = OSError("gone") if declared else ValueError("bug")
        record = Record(self.record.crashes_s, stopping=stopping, cleanup_failed=True)
        assert isinstance(self.decided(crash, record), Escalate)
        self.start_anew()

    @rule(declared=st.booleans())
    def crash_while_stopping(self, declared: bool) -> None:
        crash = OSError("gone") if declared else ValueError("bug")
        assert self.decided(crash, Record(self.record.crashes_s, stopping=True)) == Stop()
        self.start_anew()

    def start_anew(self) -> None:
        """The system ended; another one begins."""
        self.record, self.crashes_s, self.restarts_s, self.pause_s, self.before = Record(), [], [], None, 0

    @invariant()
    def no_window_holds_more_restarts_than_the_limit(self) -> None:
        if hasattr(self, "policy"):
            for at in self.restarts_s:
                inside = [each for each in self.restarts_s if 0.0 <= at - each < self.policy.window_s]
                assert len(inside) <= self.policy.limit

    @invariant()
    def what_is_remembered_is_bounded(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.record.crashes_s) <= self.policy.limit + 1
            assert list(self.record.crashes_s) == sorted(self.record.crashes_s)


SupervisionMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestDSupervisionAgreesWithAModel = SupervisionMachine.TestCase


@given(names=st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=6, unique=True), data=st.data())
def test_D_what_started_after_the_crashed_actor_restarts_with_it_in_the_order_of_starting(
    names: list[str], data: st.DataObject
) -> None:
    crashed = data.draw(st.sampled_from(names))
    assert to_restart(Strategy.ONE_FOR_ONE, names, crashed) == (crashed,)
    rest = to_restart(Strategy.REST_FOR_ONE, names, crashed)
    assert rest[0] == crashed
    assert rest == tuple(name for name in names if names.index(name) >= names.index(crashed))


@given(count=st.integers(2, 2000))
def test_D_a_pause_is_bounded_however_often_an_actor_crashes(count: int) -> None:
    policy = RestartPolicy(limit=5000, window_s=1e9, backoff_s=0.1, backoff_limit_s=5.0, restart_on=(OSError,))
    record = Record(tuple(float(at) for at in range(count)))
    assume(count < policy.limit)
    _, decision = decide(policy, record, OSError(), float(count))
    assert isinstance(decision, Restart)
    assert decision.after_s == pytest.approx(min(0.1 * 2.0 ** min(count, 100), 5.0))
