"""Suite ``fp8``: the transformer of ``stream_gpu`` in FP8, streamed from an artifact made of its BF16 checkpoint.

The floor of a forward is max(what the model computes that torchao quantised in memory, its FP8 bytes over the measured
link). A warm start stands beside quantising again. Rows are kept as they are measured. With
HOSTWEIGHTS_BENCH_DEVICE=cpu, a small model on the CPU shows that it runs.
"""

import gc
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.results_format import KEEPER, Goal, Results
from benchmarks.stream_gpu import SMALL
from benchmarks.stream_model import Shape, Transformer, sample, write_checkpoint
from benchmarks.stream_timing import Timing, link_bytes_per_s, measure, roomy_place, settle
from hostweights import Config, Mode, Representation, open_sync, warm

Row = dict[str, object]

TOKENS = (1024, 4096)
STARTS = 3


def run() -> Results:
    """Run the suite."""
    device = os.environ.get("HOSTWEIGHTS_BENCH_DEVICE", "cuda")
    shape, tokens = (Shape(), TOKENS) if device != "cpu" else SMALL
    place = None if device == "cpu" else roomy_place(2 * shape.blocks * shape.block_bytes)
    with tempfile.TemporaryDirectory(prefix="hostweights-fp8-", dir=place, ignore_cleanup_errors=True) as folder:
        bench = Bench(Path(folder), device, shape, tokens)
        bench.prepare()
        bench.resident()
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
        bench.quantise()
        bench.streamed()
        return {"rows": bench.rows, "goals": bench.goals()}


class Bench:
    """The model, the store, and what was measured so far."""

    def __init__(self, folder: Path, device: str, shape: Shape, tokens: tuple[int, ...]) -> None:
        self.checkpoint = folder / "model.safetensors"
        self.config = Config(root=str(folder / "store"), representation=Representation.FP8)
        self.device, self.shape, self.tokens = device, shape, tokens
        self.rows: list[Row] = []
        self.link = 0.0
        self.block_bytes = 0
        self.quantised_s = 0.0
        self.starts: list[float] = []
        self.expected: dict[int, Timing] = {}
        self.found: dict[int, Timing] = {}

    def prepare(self) -> None:
        """Write the BF16 checkpoint and measure the link."""
        size_bytes = write_checkpoint(self._factory, self.checkpoint, self.device)
        self.link = link_bytes_per_s(self.device)
        self._row(method="checkpoint", bytes=size_bytes)
        self._row(method="pinned link", gb_per_s=self.link / 1e9)

    def resident(self) -> None:
        """The model that torchao quantises in memory, whole on the device."""
        with torch.device("meta"):
            module = self._factory()
        module.load_state_dict(load_file(self.checkpoint), assign=True)
        module.requires_grad_(False).to(self.device)
        began_s = time.perf_counter()
        quantise_in_memory(module)
        settle(self.device)
        self._row(method="torchao in memory", seconds=time.perf_counter() - began_s)
        for tokens in self.tokens:
            self.expected[tokens] = timing = self._measured(module, tokens)
            self._row(method="resident", tokens=tokens, seconds=timing.seconds, peak_bytes=timing.peak_bytes)

    def quantise(self) -> None:
        """From the BF16 checkpoint to the published artifact, once; then what a start pays that finds it."""
        made = warm(self.config, self._factory, self.checkpoint)
        self.quantised_s = made.seconds
        self._row(method="quantise and publish", seconds=made.seconds, bytes=made.size_bytes)
        for _ in range(STARTS):
            began_s = time.perf_counter()
            with open_sync(self._required()) as host:
                loaded = host.load(self._factory, self.checkpoint)
                self.starts.append(time.perf_counter() - began_s)
                host.unload(loaded)
            self._row(method="warm start", seconds=self.starts[-1])

    def streamed(self) -> None:
        """The same model through two slots."""
        with open_sync(self._required()) as host, torch.inference_mode():
            loaded = host.load(self._factory, self.checkpoint)
            attachment = host.attach(loaded, device=self.device)
            self.block_bytes = attachment.info.block_bytes
            for tokens in self.tokens:
                self.found[tokens] = timing = self._measured(loaded.module, tokens)
                self._row(
                    method="streamed",
                    tokens=tokens,
                    seconds=timing.seconds,
                    over_floor=timing.seconds / self._floor(tokens),
                    over_bf16_link=timing.seconds / (self.shape.blocks * self.shape.block_bytes / self.link),
                    equal=torch.equal(timing.output, self.expected[tokens].output),
                    peak_bytes=timing.peak_bytes,
                )
            host.detach(attachment)

    def goals(self) -> list[Goal]:
        """What was promised of this suite."""
        goals: list[Goal] = []
        for tokens in self.tokens:
            ratio = self.found[tokens].seconds / self._floor(tokens)
            goals.append(Goal(id=f"floor-{tokens}", goal="<= 1.02 x the floor", value=ratio, met=ratio <= 1.02))
            equal = torch.equal(self.found[tokens].output, self.expected[tokens].output)
            goals.append(Goal(id=f"equal-{tokens}", goal="equal to the bit", value=float(equal), met=equal))
        share = self.block_bytes / (self.shape.blocks * self.shape.block_bytes)
        goals.append(Goal(id="bytes", goal="<= 0.51 of BF16", value=share, met=share <= 0.51))
        faster = self.quantised_s / sorted(self.starts)[STARTS // 2]
        goals.append(Goal(id="warm-start", goal="> 1 x faster than quantising again", value=faster, met=faster > 1.0))
        return goals

    def _measured(self, module: nn.Module, tokens: int) -> Timing:
        x = sample(self.shape, tokens, self.device)
        return measure(lambda: module(x), self.device)

    def _required(self) -> Config:
        return Config(root=self.config.root, representation=Representation.FP8, mode=Mode.REQUIRED)

    def _floor(self, tokens: int) -> float:
        return max(self.expected[tokens].seconds, self.block_bytes / self.link)

    def _factory(self) -> nn.Module:
        return Transformer(self.shape)

    def _row(self, **row: object) -> None:
        self.rows.append(row)
        logging.getLogger("benchmarks").info(" ".join(f"{name}={value}" for name, value in row.items()))
        KEEPER.keep({"rows": self.rows, "goals": []})


def quantise_in_memory(module: nn.Module) -> None:
    """Every linear weight as torchao's FP8, one scale a tensor, by torchao alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8.inference import Float8MMConfig
        from torchao.quantization import Float8Tensor, PerTensor
        from torchao.quantization.quantize_.common import KernelPreference
        from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs

    config, kernel = Float8MMConfig(use_fast_accum=True), KernelPreference.TORCH
    activations = QuantizeTensorToFloat8Kwargs(granularity=PerTensor(), mm_config=config, kernel_preference=kernel)
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            whole = Float8Tensor.from_hp(
                linear.weight.detach(),
                granularity=PerTensor(),
                mm_config=config,
                kernel_preference=kernel,
                act_quant_kwargs=activations,
            )
            linear.weight = nn.Parameter(whole, requires_grad=False)
