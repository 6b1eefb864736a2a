import copy
import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from child_kit import Child, run_child
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import ProductionPlan, TensorSpec
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.store import LocalStore
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import (
    SPECS,
    FixedProducer,
    assert_right_values,
    build,
    hit,
    make_tensor,
    nobody_locks,
    open_store,
    published,
    same_bytes,
    spec,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


def _mapped(directory: Path) -> int:
    """How many mappings of files in the directory this process has."""
    return Path("/proc/self/maps").read_text().count(str(directory))


def test_A6_the_extent_of_a_block_holds_its_tensors_where_the_manifest_says(store: LocalStore) -> None:
    lease = published(store)
    for index, block in enumerate(lease.manifest.blocks):
        extent = lease.extent(index)
        assert (extent.dtype, extent.numel()) == (torch.uint8, block.size_bytes)
        assert extent.data_ptr() % 4096 == 0
        for entry in lease.manifest.tensors:
            if entry.block == index:
                start = entry.offset - block.offset
                stored = extent[start : start + entry.size_bytes]
                assert torch.equal(stored, make_tensor(_spec(entry.name)).reshape(-1).view(torch.uint8))


def _spec(name: str) -> TensorSpec:
    return next(s for s in SPECS if s.name == name)


def test_T08_every_tensor_starts_at_256_bytes_in_memory(store: LocalStore) -> None:
    lease = published(store)
    for entry in lease.manifest.tensors:
        if entry.size_bytes:
            assert lease.shared(entry.name).data_ptr() % 256 == 0


@pytest.mark.parametrize("index", [-1, 2])
def test_A6_an_unknown_tensor_or_block_is_named(store: LocalStore, index: int) -> None:
    lease = published(store)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: lease.shared("nope"),
        lambda: lease.tensor("nope"),
        lambda: lease.extent(index),
    ]
    for call in calls:
        with pytest.raises(HostWeightsError, match=f"nope|block {index}") as caught:
            call()
        assert caught.value.code is Code.ARTIFACT_MISSING


def test_T18_a_stray_write_to_a_private_tensor_changes_no_file_and_no_other_lease(store: LocalStore) -> None:
    lease, other = published(store), hit(store)
    lease.tensor("blocks.0.weight").fill_(-1.0)
    assert lease.tensor("blocks.0.weight").eq(-1.0).all()
    assert_right_values(other)
    assert same_bytes(lease.shared("blocks.0.weight"), make_tensor(_spec("blocks.0.weight")))
    other.verify(PlainBudget())


def test_T18_a_write_to_a_shared_tensor_kills_the_process_by_signal(store: LocalStore) -> None:
    published(store)
    code = """
        import faulthandler
        faulthandler.disable()
        hit(open_store(Path(sys.argv[1]))).shared("head").fill_(1)
    """
    with Child(code, store.root) as child:
        assert child.wait() == -signal.SIGSEGV


def test_T19_views_outlive_the_close_and_pages_go_with_the_last_of_them(store: LocalStore) -> None:
    lease = published(store)
    view, part = lease.shared("blocks.0.weight"), lease.tensor("blocks.0.weight")[3:9, 1:]
    parameter = torch.nn.Parameter(lease.tensor("embed"), requires_grad=False)
    directory = lease.directory
    lease.close()
    lease.close()
    assert lease.closed
    assert _mapped(directory) == 2
    assert same_bytes(view, make_tensor(_spec("blocks.0.weight")))
    assert same_bytes(part, make_tensor(_spec("blocks.0.weight"))[3:9, 1:])
    assert same_bytes(parameter, make_tensor(_spec("embed")))
    del view
    assert _mapped(directory) == 1
    del part, parameter
    assert _mapped(directory) == 0


@pytest.mark.parametrize("always", [False, True])
def test_A6_a_mapping_warns_nobody_of_memory_that_cannot_be_written(store: LocalStore, always: bool) -> None:
    code = """
        import warnings
        torch.set_warn_always(sys.argv[2] == "True")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for lease in (published(open_store(Path(sys.argv[1]))), hit(open_store(Path(sys.argv[1])))):
                assert_right_values(lease)
            lease.tensor("embed")
        say([str(warning.message) for warning in seen])
    """
    assert run_child(code, store.root, always) == "[]"


def test_T19_a_close_without_views_unmaps_at_once(store: LocalStore) -> None:
    lease = published(store)
    views = [lease.shared("embed"), lease.tensor("embed"), lease.extent(0)]
    assert _mapped(lease.directory) == 2
    views.clear()
    lease.close()
    assert _mapped(lease.directory) == 0


def test_T19_a_closed_lease_hands_out_nothing(store: LocalStore) -> None:
    lease = published(store)
    lease.close()
    for call in (
        lambda: lease.shared("embed"),
        lambda: lease.tensor("embed"),
        lambda: lease.extent(0),
        lambda: _hold(lease),
        lambda: lease.verify(PlainBudget()),
    ):
        with pytest.raises(HostWeightsError, match="closed") as caught:
            call()
        assert caught.value.code is Code.LEASE_UNKNOWN


def _hold(lease: ArtifactLease) -> None:
    with lease.hold("x"):
        pass


def test_A6_close_is_refused_with_the_holders_names_until_all_let_go(store: LocalStore) -> None:
    lease = published(store)
    with lease.hold("ring 1"):
        with lease.hold("ring 2"), lease.hold("ring 2"), pytest.raises(HostWeightsError) as caught:
            lease.close()
        assert caught.value.code is Code.LEASE_IN_USE
        assert caught.value.failure.details["holders"] == "ring 1, ring 2 (2)"
        with pytest.raises(HostWeightsError, match="ring 1; detach"):
            lease.close()
    assert not lease.closed
    assert_right_values(lease)
    lease.close()
    assert lease.closed


def test_A6_a_lease_cannot_be_copied(store: LocalStore) -> None:
    with pytest.raises(TypeError, match="kernel lock"):
        copy.copy(published(store))


def test_A6_a_forgotten_lease_lets_its_lock_and_pages_go(store: LocalStore) -> None:
    lease = published(store)
    directory = lease.directory
    del lease
    gc.collect()
    assert _mapped(directory) == 0
    assert nobody_locks(directory / "READY.json")


def test_T24_a_forked_childs_close_and_exit_leave_the_parents_lock(store: LocalStore) -> None:
    build(store).lease.close()
    code = """
        lease = hit(open_store(Path(sys.argv[1])))
        view = lease.shared("embed")
        child = os.fork()
        if child == 0:
            for call in (lambda: lease.shared("embed"), lambda: lease.hold("x").__enter__()):
                try:
                    call()
                except Exception as failure:
                    assert "forked child" in str(failure), failure
                else:
                    os._exit(3)
            assert same_bytes(view, make_tensor(SPECS[0]))
            lease.close()
            del lease
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        say("ready")
        wait_for_parent()
        assert_right_values(lease)
        lease.close()
        say("closed")
        wait_for_parent()
    """
    ready = next((store.root / "artifacts").rglob("READY.json"))
    with Child(code, store.root) as holder:
        assert holder.line() == "ready"
        assert not nobody_locks(ready)
        holder.tell()
        assert holder.line() == "closed"
        assert nobody_locks(ready)
        holder.tell()
        holder.end()


def test_T24_a_child_with_the_id_of_the_leaseholder_closes_no_file_of_its_own(store: LocalStore) -> None:
    """A process in a nested namespace, or one that came long after, may have the id that the holder has or had."""
    build(store).lease.close()
    code = """
        import gc
        lease = hit(open_store(Path(sys.argv[1])))
        number, parent = lease._lock.fd, os.getpid()
        child = os.fork()
        if child == 0:
            os.getpid = lambda: parent
            mine = os.open("/dev/null", os.O_RDONLY)
            if mine != number:
                os.dup2(mine, number)
            lease.close()
            del lease
            gc.collect()
            os.fstat(number)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        say("ready")
        wait_for_parent()
    """
    with Child(code, store.root) as holder:
        assert holder.line() == "ready"
        holder.tell()
        holder.end()


def test_T24_a_child_that_was_forked_below_python_keeps_no_closed_lease(store: LocalStore) -> None:
    build(store).lease.close()
    code = """
        import ctypes, signal
        lease = hit(open_store(Path(sys.argv[1])))
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            signal.pause()
        lease.close()
        say("closed")
        wait_for_parent()
        os.kill(child, 9)
        os.waitpid(child, 0)
    """
    ready = next((store.root / "artifacts").rglob("READY.json"))
    with Child(code, store.root) as holder:
        assert holder.line() == "closed"
        assert nobody_locks(ready)
        holder.tell()
        holder.end()


def test_T24_a_forked_child_that_outlives_its_parent_pins_no_artifact_and_no_build(store: LocalStore) -> None:
    build(store).lease.close()
    code = """
        from hostweights.hwr.locks import LockHandle
        store = open_store(Path(sys.argv[1]))
        lease = hit(store)
        lock = store._build_lock(store._workshop(), lease.manifest.key, PlainBudget())
        child = os.fork()
        if child == 0:
            say(f"child {os.getpid()}")
            wait_for_parent()
            os._exit(0)
        os.kill(os.getpid(), 9)
    """
    ready = next((store.root / "artifacts").rglob("READY.json"))
    lock = next((store.root / "locks").glob("*.build.lock"))
    with Child(code, store.root) as holder:
        assert holder.line().startswith("child ")
        holder.wait()
        assert nobody_locks(ready)
        assert nobody_locks(lock)
        holder.tell()


def test_T38_a_killed_leaseholder_leaves_no_lock(store: LocalStore) -> None:
    build(store).lease.close()
    code = """
        lease = hit(open_store(Path(sys.argv[1])))
        say("leased")
        wait_for_parent()
    """
    ready = next((store.root / "artifacts").rglob("READY.json"))
    with Child(code, store.root) as holder:
        assert holder.line() == "leased"
        assert not nobody_locks(ready)
        holder.signal(signal.SIGKILL)
        holder.wait()
        assert nobody_locks(ready)


def test_T20_a_large_file_maps_under_a_small_memory_limit_for_private_data() -> None:
    code = """
        import resource, tempfile
        from hostweights.hwr.mapping import FileMapping
        with tempfile.TemporaryFile() as file:
            file.truncate(24 * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
            mapping = FileMapping(file.fileno(), Path("big"), shared=True)
            assert mapping.extent(2**34, 5).eq(0).all()
            resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
            try:
                FileMapping(file.fileno(), Path("big"), shared=True)
            except Exception as failure:
                say(failure.code)
    """
    assert run_child(code) == "io_error"


def _model(layers: int) -> FixedProducer:
    """Three tensors of one form outside every block, unevenly spread; in each block three of it and one of its own."""
    inside = [spec(f"{i}.{name}", (16, 8), DType.BF16, i) for i in range(layers) for name in ("k", "v", "o")]
    odd = [spec(f"{i}.odd", (i, 5), DType.F32, i) for i in range(layers)]
    specs = [spec(name, (16, 8), DType.BF16) for name in ("first", "second", "third")]
    specs.insert(1, spec("between", (3,), DType.U8))
    for i in range(layers):
        specs += [*inside[3 * i : 3 * i + 3], odd[i]]
    return FixedProducer(ProductionPlan(tuple(specs), tuple(f"b{i}" for i in range(layers)), (("tied", "0.v"),)))


@pytest.mark.parametrize("producer", [FixedProducer(), _model(1), _model(7)])
def test_A6_all_tensors_at_once_are_those_that_are_asked_for_one_by_one(
    store: LocalStore, producer: FixedProducer
) -> None:
    build(store, producer)
    lease = hit(store)
    names = [entry.name for entry in lease.manifest.tensors] + [alias.name for alias in lease.manifest.aliases]
    for all_of_them, one in ((lease.all_shared(), lease.shared), (lease.all_tensors(), lease.tensor)):
        assert all_of_them.keys() == set(names)
        for name, found in all_of_them.items():
            wanted = one(name)
            assert found.data_ptr() == wanted.data_ptr()
            assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
            assert same_bytes(found, wanted)
    lease.close()
    for closed in (lease.all_shared, lease.all_tensors):
        with pytest.raises(HostWeightsError) as caught:
            closed()
        assert caught.value.code is Code.LEASE_UNKNOWN


def test_T19_views_made_at_once_keep_their_pages_after_the_close(store: LocalStore) -> None:
    lease = published(store)
    directory, found = lease.directory, lease.all_tensors()
    assert _mapped(directory) == 2
    lease.close()
    last = found["head"]
    del found, lease
    assert _mapped(directory) == 1
    assert same_bytes(last, make_tensor(_spec("head")))
    del last
    gc.collect()
    assert _mapped(directory) == 0
