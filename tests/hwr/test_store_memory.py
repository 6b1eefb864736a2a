import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from child_kit import Child
from hostweights.hwr.contract import ProductionPlan
from hostweights.hwr.memory import (
    MappedMemory,
    mapped_memory,
    parse_smaps,
    process_memory,
    processes_mapping,
    sum_areas,
    trim,
)
from hostweights.messages.dtypes import DType
from store_kit import FixedProducer, build, open_store, published, spec

SMAPS = """\
7f0000000000-7f0000002000 r--s 00000000 08:01 42                         /srv/root/artifacts/a/w 1.safetensors
Size:                  8 kB
Rss:                   8 kB
Pss:                   4 kB
Shared_Clean:          8 kB
Private_Clean:         0 kB
Anonymous:             0 kB
VmFlags: rd sh mr
7f0000002000-7f0000004000 rw-p 00000000 08:01 42                         /srv/root/artifacts/a/w 1.safetensors
Rss:                   8 kB
Pss:                   6 kB
Shared_Clean:          0 kB
Private_Clean:         4 kB
Anonymous:             4 kB
ProtectionKey:         0
7f0000004000-7f0000005000 rw-p 00000000 00:00 0
Rss:                 100 kB
7f0000005000-7f0000006000 r--s 00000000 08:01 43                         /srv/root/artifacts/ab/other
Rss:                 100 kB
"""


def test_A15_smaps_text_is_summed_over_the_files_of_one_directory() -> None:
    found = sum_areas(parse_smaps(SMAPS), "/srv/root/artifacts/a")
    assert found == MappedMemory(
        rss_bytes=16384, pss_bytes=10240, private_clean_bytes=4096, shared_bytes=8192, anonymous_bytes=4096
    )
    assert sum_areas(parse_smaps(SMAPS), "/srv/root/artifacts/b") == MappedMemory()
    assert parse_smaps("nonsense\n\nRss: 3 kB\n") == []
    (area,) = parse_smaps(f"0-1 r--s 0 0:0 0\nRss: \N{SUPERSCRIPT TWO} kB\nPss: {'9' * 5000} kB\n")
    assert area.bytes_by_name == {}


def test_A15_this_processs_anonymous_memory_grows_with_a_private_buffer() -> None:
    trim()
    before = process_memory()
    buffer = bytearray(b"x" * 8_000_000)
    after = process_memory()
    assert after.anonymous_bytes - before.anonymous_bytes > 7_000_000
    assert after.pss_bytes > before.pss_bytes
    assert buffer


@pytest.mark.parametrize("name", ["root", "ro\not", "ro\udcffot", "r o"])
def test_A15_who_maps_a_generation_is_found_whatever_its_root_is_called(tmp_path: Path, name: str) -> None:
    lease = published(open_store(tmp_path / name))

    assert processes_mapping(lease.path) == [os.getpid()]
    assert lease.shared("embed").isnan().sum() >= 0  # touches a page
    assert mapped_memory(lease.path).rss_bytes > 0


SIZE = 32 * 2**20


def test_M1_two_processes_share_one_physical_copy_and_own_no_anonymous_page(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    plan = ProductionPlan((spec("w", (SIZE,), DType.U8),), ())
    lease = build(store, FixedProducer(plan)).lease
    directory = lease.directory
    lease.close()
    code = """
        lease = hit(open_store(Path(sys.argv[1])))
        lease.shared("w").sum(), lease.tensor("w").sum()
        say("touched")
        wait_for_parent()
    """
    with ExitStack() as stack:
        children = [stack.enter_context(Child(code, tmp_path / "root")) for _ in range(2)]
        assert [child.line() for child in children] == ["touched"] * 2
        measured = [mapped_memory(directory, child.pid) for child in children]
        for child in children:
            child.tell()
            child.end()
    assert sum(m.pss_bytes for m in measured) <= 1.02 * (SIZE + 8192)
    for one in measured:
        assert one.anonymous_bytes == 0
        assert one.rss_bytes >= 2 * SIZE
        assert one.shared_bytes >= 2 * SIZE
