"""What a store of many artifacts costs.

A lookup that misses, an acquire, opening the store, a list, its account, a collection that finds nothing, and one
publication more.

The artifacts are published in small stores of their own and moved over, since publishing is what this measures: a
generation is a directory that knows nothing of its store, and an account that is not there is counted anew.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.repeats import timed
from benchmarks.scale.points import Row, artifact_counts, point
from benchmarks.store.inputs import identity, look_up, publish, random_tensors
from hostweights.hwr.account import RECORD_NAME
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation, WaitPolicy

_TOGETHER = 200
_PAYLOAD_BYTES = 64
_ONE_MORE = "one more"


def rows(folder: Path) -> Iterator[Row]:
    """Each cost for each count of artifacts."""
    root, made = folder / "artifacts-store", 0
    for count in artifact_counts():
        made = _fill(root, folder / "nursery", made, count)
        (root / RECORD_NAME).unlink(missing_ok=True)
        store = _open(root)
        assert store.usage(PlainBudget()).generations == count
        yield from _of(store, count)
        store.close()


def _open(root: Path) -> LocalStore:
    return LocalStore.open(root, WaitPolicy(), PlainBudget())


def _fill(root: Path, nursery: Path, made: int, count: int) -> int:
    _open(root).close()
    producer = random_tensors(1, _PAYLOAD_BYTES)
    while made < count:
        until = min(count, made + _TOGETHER)
        store = _open(nursery / f"from-{made}")
        for number in range(made, until):
            publish(store, _name(number), producer).close()
        store.close()
        for keyed in (store.root / "artifacts").iterdir():
            keyed.rename(root / "artifacts" / keyed.name)
        made = until
    return made


def _name(number: int) -> str:
    return f"artifact-{number}"


def _of(store: LocalStore, count: int) -> Iterator[Row]:
    budget, chosen, producer = PlainBudget(), random.Random(count), random_tensors(1, _PAYLOAD_BYTES)

    def miss() -> None:
        store.lookup(identity("nobody published this"), Validation.METADATA, budget, lease_id="bench")

    def acquire() -> None:
        look_up(store, _name(chosen.randrange(count)), Validation.METADATA).close()

    def take_out() -> None:
        (lease,) = kept
        kept.clear()
        lease.close()
        store.remove(lease.manifest.key, lease.directory.name)

    kept = []
    costs = {"lookup that misses": miss, "acquire": acquire, "open the store": lambda: _open(store.root).close()}
    for cost, call in costs.items():
        yield point("artifacts", cost, count, timed(call, least=25, most=200, within_s=0.5))
    yield point("artifacts", "list", count, timed(store.list_stored, most=9))
    yield point("artifacts", "account", count, timed(lambda: store.usage(budget), most=9))
    yield point("artifacts", "collect, nothing to collect", count, timed(lambda: store.collect(budget), most=5))
    more = timed(lambda: kept.append(publish(store, _ONE_MORE, producer)), after=take_out, least=5, most=15)
    yield point("artifacts", "publish one more", count, more)
