"""D6: a Config that is made in Python is checked once, where it is used; what is equal by value means the same."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch
from msgspec.structs import replace

from hostweights import (
    Adapter,
    Code,
    Config,
    HostWeights,
    HostWeightsError,
    Mode,
    ModelRecord,
    ProductionPolicy,
    RuntimePolicy,
    SyncHostWeights,
    WaitPolicy,
    open_sync,
    warm,
)
from hostweights.messages.config import checked_config
from hostweights.messages.report import Outcome
from tiny_model import factory, make_checkpoint


def settings(tmp_path: Path, **changes: object) -> Config:
    return replace(
        Config(root=str(tmp_path / "store"), production=ProductionPolicy(publish_after_load=False)), **changes
    )


def refusal(use: Callable[[], object]) -> str:
    with pytest.raises(HostWeightsError) as caught:
        use()
    assert caught.value.code is Code.INVALID_CONFIG
    return str(caught.value)


def opened(config: Config) -> SyncHostWeights:
    with open_sync(config) as host:
        return host


def test_D6_the_text_full_reads_every_byte(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    made = warm(settings(tmp_path), factory(), source)
    (payload,) = Path(made.directory).glob("*.safetensors")
    payload.chmod(0o644)
    with payload.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))

    with open_sync(settings(tmp_path, validation="full")) as host:
        assert host.load(factory(), source).report.outcome is Outcome.CANONICAL


def test_D6_the_text_disabled_touches_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)

    with open_sync(settings(tmp_path, mode="disabled")) as host:
        assert host.load(factory(), source).report.outcome is Outcome.DISABLED

    assert not (tmp_path / "store").exists()


@pytest.mark.asyncio
async def test_D6_the_mode_of_one_load_is_checked_too(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(settings(tmp_path)) as host:
        loaded = await host.load(factory(), source, mode=cast("Mode", "disabled"))
        assert loaded.report.outcome is Outcome.DISABLED
        with pytest.raises(HostWeightsError, match=r"no mode 'of'.* disabled, preferred, required") as caught:
            await host.load(factory(), source, mode=cast("Mode", "of"))
        assert caught.value.code is Code.INVALID_CONFIG
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mode": "of"}, "mode"),
        ({"validation": "fulll"}, "validation"),
        ({"validation": "\ud800"}, ""),
        ({"root": ""}, "root"),
        ({"root": b"/store"}, "root"),
        ({"wait": WaitPolicy(build_s=-1.0)}, "wait.build_s"),
        ({"wait": WaitPolicy(domain_s=float("nan"))}, "wait.domain_s"),
        ({"wait": {"buld_s": 1.0}}, "buld_s"),
        ({"production": ProductionPolicy(adopt=cast("bool", "no"))}, "production.adopt"),
        ({"runtime": RuntimePolicy(mailbox_limit=0)}, "runtime.mailbox_limit"),
        ({"runtime": object()}, ""),
    ],
)
def test_D6_what_is_no_setting_is_refused_by_name(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    config = settings(tmp_path, **changes)

    assert named in refusal(lambda: opened(config))
    assert named in refusal(lambda: warm(config, factory(), make_checkpoint(tmp_path)))
    assert not (tmp_path / "store").exists()


RECORD = ModelRecord(record_id="tiny", version=1, component="tiny", blocks=("blocks",))


def use(tmp_path: Path, how: str, record: ModelRecord | None = None, adapter: Adapter | None = None) -> None:
    config, source = settings(tmp_path), make_checkpoint(tmp_path)
    if how == "warm":
        warm(config, factory(), source, record=record, adapter=adapter)
    else:
        with open_sync(config) as host:
            host.load(factory(), source, record=record, adapter=adapter)


@pytest.mark.parametrize("how", ["warm", "load"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"blocks": 3}, "$.blocks"),
        ({"blocks": "blocks"}, "$.blocks"),
        ({"blocks": ("blocks", 3)}, "$.blocks[1]"),
        ({"renames": (("a", "\udc80"),)}, "renames holds text that is not valid Unicode"),
        ({"casts": ((torch.float32, torch.bfloat16),)}, "$.casts[0][0]"),
        ({"packings": (3,)}, "$.packings[0]"),
        ({"tp_size": "2"}, "$.tp_size"),
        ({"validator": 3}, "validator is 3"),
    ],
)
def test_D6_a_record_is_checked_field_by_field(
    tmp_path: Path, how: str, changes: dict[str, object], named: str
) -> None:
    assert named in refusal(lambda: use(tmp_path, how, replace(RECORD, **changes)))


@pytest.mark.parametrize("how", ["warm", "load"])
def test_D6_what_is_no_record_is_refused_and_lists_are_taken_for_tuples(tmp_path: Path, how: str) -> None:
    assert "expected a ModelRecord" in refusal(lambda: use(tmp_path, how, cast("ModelRecord", "")))
    use(tmp_path, how, replace(RECORD, blocks=["blocks"]))


@pytest.mark.parametrize("how", ["warm", "load"])
@pytest.mark.parametrize("adapter", ["x", Path("x"), Adapter(cast("str", None)), Adapter("x", cast("float", "1"))])
def test_D6_what_is_no_adapter_is_refused_by_name(tmp_path: Path, how: str, adapter: object) -> None:
    assert "the adapter is " in refusal(lambda: use(tmp_path, how, adapter=cast("Adapter", adapter)))


def test_D6_a_path_object_and_a_name_that_is_no_text_are_roots(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    with open_sync(settings(tmp_path, root=Path(odd))) as host:
        assert host.load(factory(), make_checkpoint(tmp_path)).report.outcome is Outcome.CANONICAL
    assert Path(odd).is_dir()


def test_D6_checking_changes_no_value(tmp_path: Path) -> None:
    config = settings(tmp_path, wait=WaitPolicy(build_s=float("inf")))
    assert checked_config(config) == config
    assert msgspec.json.encode(checked_config(config)) == msgspec.json.encode(config)
