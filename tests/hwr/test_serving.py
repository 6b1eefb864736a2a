"""A model that serves while it is published and adopted, and code that writes where it should only read."""

import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hostweights import Code, Config, HostWeights, HostWeightsError, LoadedModel, Mode
from hostweights.actors.assembly import TRANSPORT
from hostweights.messages.config import ProductionPolicy
from hostweights.messages.failure import Failure
from hostweights.messages.transport import Rebase
from loader_models import refused, save, seeded
from warm_model import Stack

HELPERS = Path(__file__).parent.parent / "helpers"
X = torch.ones(2, 8)
TIMINGS = 200


class Watched(nn.Module):
    """Notes which memory its parameters had at the start, between the blocks, and at the end of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.torn = 0

    def memory(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.memory()
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.torn += self.memory() != before
        return x


class Traffic:
    """Two threads that call a model until told to stop; counts calls and outputs that were not the expected one."""

    def __init__(self, module: nn.Module, expected: torch.Tensor) -> None:
        self.calls = self.wrong = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()

        def serve() -> None:
            while not self._stop.is_set():
                with torch.no_grad():
                    equal = torch.equal(module(X), expected)
                with self._lock:
                    self.calls, self.wrong = self.calls + 1, self.wrong + (not equal)

        self._threads = [threading.Thread(target=serve) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [False, True])
async def test_A13_forwards_during_publication_and_across_adoption_are_bit_equal_at_any_time(
    tmp_path: Path, *, streamed: bool
) -> None:
    source = save(tmp_path / "model.safetensors", seeded(Watched()).state_dict())
    with torch.no_grad():
        expected = seeded(Watched())(X)
    rng = random.Random(streamed)
    called = 0
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        for turn in range(TIMINGS // 2):
            # A name of its own: each turn is a cold load that publishes and adopts.
            model = await host.load(Watched, source, name=f"turn-{turn}")
            attachment = await host.attach(model) if streamed else None
            traffic = Traffic(model.module, expected)
            for _ in range(rng.randint(0, 40)):
                await asyncio.sleep(0)
            report = await host.adopt(model)
            for _ in range(rng.randint(0, 40)):
                await asyncio.sleep(0)
            traffic.stop()
            assert report.adopted
            assert traffic.wrong == 0
            assert isinstance(model.module, Watched)
            assert streamed or model.module.torn == 0  # a streamed block has the slot's memory while it runs
            called += traffic.calls
            if attachment is not None:
                await attachment.detach()
            await model.unload()
    assert called > TIMINGS // 2


class Surrounded(nn.Module):
    """Blocks with a bare parameter, a layer before and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8))
        self.before = nn.Conv1d(2, 2, 1)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.after = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x) * self.scale
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.after(x)
        return result


@pytest.mark.asyncio
async def test_T65_what_lies_outside_the_blocks_is_resident_before_the_first_forward(tmp_path: Path) -> None:
    source = save(tmp_path / "model.safetensors", seeded(Surrounded()).state_dict())
    with torch.no_grad():
        expected = seeded(Surrounded())(X)
        async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
            for _ in range(2):  # cold, then warm
                model = await host.load(Surrounded, source)
                attachment = await host.attach(model)
                outside = {name for name, _ in model.module.named_parameters() if not name.startswith("blocks.")}
                assert outside == {"scale", "before.weight", "before.bias", "after.weight", "after.bias"}
                assert not any(model.module.get_parameter(name).is_meta for name in outside)
                assert torch.equal(model.module(X), expected)
                await attachment.detach()
                if model.publication is not None:
                    await model.publication.wait()
                await model.unload()


async def act_of(host: HostWeights, model: LoadedModel, act: str) -> Failure:
    """The failure of publishing, adopting or streaming a model."""
    if act == "attach":
        with pytest.raises(HostWeightsError) as failed:
            await host.attach(model)
        return failed.value.failure
    report = await host.publish(model, adopt=act == "adopt").wait()
    assert report.failure is not None
    return report.failure


def write(module: nn.Module) -> None:
    module.get_parameter("blocks.1.weight").mul_(2)


def write_in_inference_mode(module: nn.Module) -> None:
    with torch.inference_mode():
        module.get_parameter("blocks.1.weight").zero_()


def load_other_state(module: nn.Module) -> None:
    module.get_submodule("blocks.1").load_state_dict({"weight": torch.zeros(8, 8), "bias": torch.zeros(8)})


def replace(module: nn.Module) -> None:
    vars(module.get_submodule("blocks.1"))["_parameters"]["weight"] = nn.Parameter(torch.zeros(8, 8))


@pytest.mark.asyncio
@pytest.mark.parametrize("change", [write, write_in_inference_mode, load_other_state, replace])
@pytest.mark.parametrize(("warm", "act"), [(w, a) for w in (False, True) for a in ("publish", "adopt", "attach")])
async def test_T18_changed_model_is_not_taken_for_its_artifact(
    tmp_path: Path, change: Callable[[nn.Module], None], act: str, *, warm: bool
) -> None:
    source = save(tmp_path / "model.safetensors", seeded(Watched()).state_dict())
    quiet = Config(root=str(tmp_path / "store"), production=ProductionPolicy(publish_after_load=False))
    async with HostWeights(quiet) as host:
        first = await host.load(Watched, source)
        if warm:
            assert (await host.publish(first, adopt=False).wait()).failure is None
            model = await host.load(Watched, source, mode=Mode.REQUIRED)
        else:
            model = first
        change(model.module)
        expected = model.module(X)
        if act == "attach" and not warm:
            await host.attach(model)  # private tensors stream as they are, with the change
        else:
            failure = await act_of(host, model, act)
            assert failure.code is Code.SOURCE_CHANGED
            assert "tensor blocks.1.weight was" in failure.text
        assert torch.equal(model.module(X), expected)


@pytest.mark.asyncio
async def test_T18_write_between_publication_and_adoption_is_not_lost(tmp_path: Path) -> None:
    source = save(tmp_path / "model.safetensors", seeded(Watched()).state_dict())
    quiet = Config(root=str(tmp_path / "store"), production=ProductionPolicy(publish_after_load=False))
    async with HostWeights(quiet) as host:
        model = await host.load(Watched, source)
        assert (await host.publish(model, adopt=False).wait()).failure is None
        other = await host.load(Watched, source, mode=Mode.REQUIRED)
        write(model.module)
        expected = model.module(X)
        with refused(Code.SOURCE_CHANGED, "blocks.1.weight", "adoption"):
            await host._assembly.ask(TRANSPORT, Rebase(model_id=model.model_id, lease_id=other.lease_id))
        assert torch.equal(model.module(X), expected)


@pytest.mark.asyncio
async def test_T18_streaming_and_adoption_by_itself_are_no_change(tmp_path: Path) -> None:
    source = save(tmp_path / "model.safetensors", seeded(Watched()).state_dict())
    with torch.no_grad():
        async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
            model = await host.load(Watched, source)
            for _ in range(3):
                attachment = await host.attach(model)
                model.module(X)
                assert (await host.adopt(model)).failure is None
                model.module(X)
                await attachment.detach()
                assert (await host.adopt(model)).failure is None


WRITES = """
import asyncio, sys
import torch
from torch import nn
from hostweights import Config, HostWeights, Mode
from warm_model import Stack

async def main():
    source, root = sys.argv[1], sys.argv[2]
    async with HostWeights(Config(root=root)) as host:
        cold = await host.load(Stack, source)
        await cold.publication.wait()
        await cold.unload()
        one = await host.load(Stack, source, mode=Mode.REQUIRED)
        module = one.module
        weight = module.get_parameter("layers.0.weight")
        assert not weight.requires_grad
        before = weight.clone()
        weight.mul_(2)
        assert torch.equal(weight, before * 2)
        nn.init.zeros_(module.get_parameter("layers.1.weight"))
        nn.utils.parametrizations.weight_norm(module.get_submodule("layers.2"))
        head = module.get_submodule("head").requires_grad_(True)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        head(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        two = await host.load(Stack, source, mode=Mode.REQUIRED)
        plain = torch.load(sys.argv[3])
        for name, parameter in two.module.named_parameters():
            assert torch.equal(parameter, plain[name]), name
        await one.unload()
        await two.unload()
    print("done")

asyncio.run(main())
"""


def test_T18_writes_to_leased_parameters_stay_in_the_process_and_harm_nobody(tmp_path: Path) -> None:

    state = seeded(Stack()).state_dict()
    source = save(tmp_path / "model.safetensors", state)
    torch.save(dict(state), tmp_path / "plain.pt")
    done = subprocess.run(
        [sys.executable, "-c", WRITES, source, tmp_path / "store", tmp_path / "plain.pt"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
