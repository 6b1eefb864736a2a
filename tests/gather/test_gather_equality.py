"""C4: gathered blocks compute what whole and resident ones do, to the bit, in 2, 3 and 4 processes."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlo_support import KINDS
from rank_kit import Pool, pool


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with pool(request.param, "serve_examples()") as made:
        yield made


@st.composite
def _examples(draw: st.DrawFn) -> dict[str, object]:
    first = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    second = draw(st.lists(st.integers(1, 90), min_size=0, max_size=3))
    blocks = st.integers(0, len(first) + len(second) - 1)
    whole = list(range(len(first) + len(second)))
    orders = draw(st.lists(st.one_of(st.just(whole), st.lists(blocks, max_size=9)), min_size=1, max_size=4))
    orders *= draw(st.sampled_from((1, 4)))
    return {
        "first": first,
        "second": second,
        "orders": orders,
        "slots": draw(st.integers(2, 5)),
        "seed": draw(st.integers(0, 1000)),
        "kind": draw(st.sampled_from(KINDS)),
        "choose": draw(st.booleans()),
        "device": draw(st.sampled_from(("cpu", "fake"))),
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(example=_examples())
def test_C4_any_blocks_any_order_any_slots_are_bit_equal_to_rank_local_and_resident(
    ranks: Pool, example: dict[str, object]
) -> None:
    assert set(ranks.ask(["model", example])) == {""}


@st.composite
def _bytes(draw: st.DrawFn) -> dict[str, object]:
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(0, 5000)), min_size=1, max_size=6))
    blocks = st.integers(0, len(sizes) - 1)
    order = draw(st.lists(blocks, max_size=10))
    return {
        "sizes": sizes,
        "order": order,
        "guesses": [draw(st.lists(blocks, max_size=4)) for _ in order],
        "scattered": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(example=_bytes())
def test_C4_bytes_of_any_length_arrive_whatever_each_rank_guesses_and_copies_ahead(
    ranks: Pool, example: dict[str, object]
) -> None:
    assert set(ranks.ask(["bytes", example])) == {""}
