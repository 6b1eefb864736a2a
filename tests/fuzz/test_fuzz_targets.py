"""Every fuzz target's check, over its real samples, over mutations of them and over random bytes."""

from typing import get_args

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from fuzz_kit import Target
from fuzz_messages import examples
from fuzz_targets import TARGETS
from hostweights.messages import AnyMessage

EXAMPLES = {"store-tree": 25, "remote": 40}
"""Of targets that touch many files; others get 80."""
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
SPLICES = (
    b"",
    b"[" * 2000,
    b"\x91" * 2000,
    b"9" * 5000,
    b"-1",
    b"\xff",
    b"..",
    b"/",
    b'"',
    b"\0",
    b"18446744073709551616",
)


@st.composite
def inputs(draw: st.DrawFn, target: Target) -> bytes:
    """Random bytes, or a sample that was cut and spliced at some places."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=200))
    data = draw(st.sampled_from(target.seeds()))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        gone = draw(st.integers(0, 12))
        data = data[:at] + draw(st.sampled_from(SPLICES) | st.binary(max_size=8)) + data[at + gone :]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_F_what_strangers_write_breaks_no_promise(name: str) -> None:
    target = TARGETS[name]
    for seed in target.seeds():
        target.check(seed)

    @settings(max_examples=EXAMPLES.get(name, 80), deadline=None, suppress_health_check=SLOW)
    @given(inputs(target))
    def check(data: bytes) -> None:
        target.check(data)

    check()


def test_F_every_message_has_a_sample() -> None:
    for kind in get_args(AnyMessage):
        assert isinstance(msgspec.msgpack.decode(examples()[kind], type=AnyMessage), kind)
