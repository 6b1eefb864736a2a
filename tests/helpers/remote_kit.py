"""What the tests of remotes share."""

from pathlib import Path

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import BuildResult, Miss, Progress
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.remote.fsspec_remote import open_remote
from hostweights.hwr.remote.push import Pushed, push
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import RemotePolicy, Validation
from store_kit import make_identity, open_store, published

TIMEOUT_S = 20.0


def policy(url: str, attempts: int = 3, timeout_s: float = TIMEOUT_S) -> RemotePolicy:
    return RemotePolicy(url=url, attempts=attempts, timeout_s=timeout_s)


def fetch(
    store: LocalStore, url: str, attempts: int = 3, timeout_s: float = TIMEOUT_S, progress: Progress | None = None
) -> BuildResult | Miss:
    return store.fetch(
        make_identity(),
        open_remote(policy(url, timeout_s=timeout_s)),
        attempts,
        Validation.METADATA,
        PlainBudget(),
        progress,
        lease_id="fetch",
    )


def fetched(store: LocalStore, url: str) -> ArtifactLease:
    result = fetch(store, url)
    assert isinstance(result, BuildResult), result
    assert isinstance(result.lease, ArtifactLease)
    return result.lease


def pushed(root: Path, url: str, *, again: bool = False) -> Pushed:
    """Publish the sample artifact in a store of its own and push it."""
    store = open_store(root)
    lease = published(store)
    try:
        return push(lease, open_remote(policy(url)), 3, PlainBudget(), again=again)
    finally:
        lease.close()
        store.close()


def payload_files(remote: Path) -> list[Path]:
    return sorted(remote.rglob("*.safetensors"))
