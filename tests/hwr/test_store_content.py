"""Publication by content."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from child_kit import run_child
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.content_addressed import content_identity
from hostweights.hwr.contract import BuildResult, Producer, ProductionPlan
from hostweights.hwr.store import LocalStore
from hostweights.messages.budget import Budget
from hostweights.messages.config import Validation
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import PLAN, SPECS, FixedProducer, assert_right_values, names_under, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


def publish(store: LocalStore, producer: Producer, component: str = "model") -> BuildResult:
    return store.build_by_content(component, producer, Validation.METADATA, PlainBudget(), lease_id="x")


def key_of(producer: Producer, component: str = "model") -> str:
    from hostweights.hwr.identity import artifact_key

    return artifact_key(content_identity(producer, component, PlainBudget()))


class Changed(FixedProducer):
    """One bit of one tensor differs from the given run on."""

    def __init__(self, first_changed_run: int) -> None:
        super().__init__()
        self._first = first_changed_run

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        for number, tensor in enumerate(super().produce(budget)):
            if number == 1 and self.runs >= self._first:
                tensor.view(torch.uint8)[0, 0] ^= 1
            yield tensor


def test_A14_equal_tensors_of_another_process_join_one_artifact(store: LocalStore) -> None:
    code = """
        store = open_store(Path(sys.argv[1]))
        result = store.build_by_content("model", FixedProducer(), Validation.METADATA, PlainBudget(), lease_id="x")
        say(f"{result.built} {result.lease.publication_id}")
    """
    built, publication = run_child(code, store.root).split()
    assert built == "True"
    producer = FixedProducer()
    result = publish(store, producer)
    assert (result.built, result.lease.publication_id) == (False, publication)
    assert producer.runs == 1
    assert result.lease.manifest.content == result.lease.manifest.identity.source.content
    assert_right_values(result.lease)  # type: ignore[arg-type]  # the store's own lease


def test_A14_one_bit_one_name_one_block_or_the_component_make_another_artifact() -> None:
    plans = [
        ProductionPlan(SPECS, ("blocks.0", "other"), PLAN.aliases),
        ProductionPlan(SPECS, PLAN.blocks, ()),
        ProductionPlan((*SPECS[1:], SPECS[0]), PLAN.blocks, PLAN.aliases),
    ]
    keys = [key_of(FixedProducer()), key_of(Changed(1)), key_of(FixedProducer(), "other")]
    keys += [key_of(FixedProducer(plan)) for plan in plans]
    assert len(set(keys)) == len(keys)
    assert key_of(FixedProducer()) == keys[0]


def test_A14_tensors_that_change_between_naming_and_writing_are_not_published(store: LocalStore) -> None:
    with pytest.raises(HostWeightsError, match="changed between naming and writing") as caught:
        publish(store, Changed(2))
    assert caught.value.code is Code.PRODUCER_FAILED
    assert names_under(store.root / "staging") == set()
    assert store.list_stored() == []
    assert publish(store, FixedProducer()).built


def test_A14_a_producer_that_omits_a_tensor_gets_no_name() -> None:
    with pytest.raises(HostWeightsError) as caught:
        key_of(FixedProducer(stop_after=3))
    assert caught.value.code is Code.PRODUCER_INCOMPLETE
