"""Suite ``stream_flux``: FLUX.2-klein-4B's real shape, by diffusers' own class, random weights, beside diffusers."""

import gc
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.results_format import KEEPER, Goal, Results
from benchmarks.stream_model import write_checkpoint
from benchmarks.stream_peers import ONE_FORWARD, ROUNDS, Enable, enabled, peers
from benchmarks.stream_timing import Timing, link_bytes_per_s, measure
from hostweights import Config, Mode, ProductionPolicy, open_sync

KLEIN = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "guidance_embeds": False,
}
TINY = {
    **KLEIN,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}
IMAGE_TOKENS = 4096
TEXT_TOKENS = 512


def run() -> Results:
    """Run the suite; needs diffusers."""
    device = os.environ.get("HOSTWEIGHTS_BENCH_DEVICE", "cuda")
    config = KLEIN if device != "cpu" else TINY
    image_tokens, text_tokens = (IMAGE_TOKENS, TEXT_TOKENS) if device != "cpu" else (16, 8)
    inputs = _inputs(config, image_tokens, text_tokens, device)
    rows: list[dict[str, object]] = []
    timings: dict[str, Timing] = {}
    with tempfile.TemporaryDirectory(prefix="hostweights-flux-", ignore_cleanup_errors=True) as folder:
        checkpoint = Path(folder) / "model.safetensors"
        size_bytes = write_checkpoint(lambda: _build(config), checkpoint, device)
        link = link_bytes_per_s(device)
        rows.append({"method": "model", "bytes": size_bytes, "link_gb_per_s": link / 1e9})

        def keep(name: str, module: nn.Module, setup_s: float, rounds: dict[str, int] = ROUNDS) -> None:
            timing = timings[name] = measure(lambda: module(**inputs)[0], device, **rounds)
            rows.append(
                {
                    "method": name,
                    "setup_s": setup_s,
                    "s_per_step": timing.seconds,
                    "peak_gib": timing.peak_bytes / 2**30,
                    "equal": torch.equal(timing.output, timings["resident"].output),
                }
            )
            KEEPER.keep({"rows": rows, "goals": _goals(timings, size_bytes / link)})

        resident = _load(config, checkpoint).to(device)
        keep("resident", resident, 0.0)
        del resident
        policy = ProductionPolicy(build_before_load=True)
        with open_sync(Config(root=f"{folder}/store", mode=Mode.REQUIRED, production=policy)) as host:
            loaded = host.load(lambda: _build(config), checkpoint)
            began_s = time.perf_counter()
            attachment = host.attach(loaded, device=device)
            keep("hostweights", loaded.module, time.perf_counter() - began_s)
            rows.append(
                {"method": "hostweights, ring", "info": str(attachment.info), "ring": str(host.ring(attachment))}
            )
            host.detach(attachment)
        for name, (enable, rounds) in peers().items() if device != "cpu" else ():
            if rounds is not ONE_FORWARD:
                _peer(rows, name, partial(_enabled, enable, config, checkpoint, device), partial(keep, rounds=rounds))
    return {"rows": rows, "goals": _goals(timings, size_bytes / link)}


def _peer(
    rows: list[dict[str, object]],
    name: str,
    enable: Callable[[], tuple[nn.Module, float]],
    keep: Callable[[str, nn.Module, float], None],
) -> None:
    try:
        keep(name, *enable())
    except Exception as failure:  # noqa: BLE001 - somebody else's code; the row says so
        rows.append({"method": name, "failure": f"{type(failure).__name__}: {failure}"})
    gc.collect()
    torch.cuda.empty_cache()


def _enabled(enable: Enable, config: dict[str, object], checkpoint: Path, device: str) -> tuple[nn.Module, float]:
    return enabled(enable, _load(config, checkpoint), device)


def _goals(timings: dict[str, Timing], copied_s: float) -> list[Goal]:
    if "hostweights" not in timings:
        return []
    ours, resident = timings["hostweights"], timings["resident"]
    equal = torch.equal(ours.output, resident.output)
    ratio = ours.seconds / max(resident.seconds, copied_s)
    goals = [
        Goal(id="equal", goal="equal to the bit", value=float(equal), met=equal),
        Goal(id="floor", goal="<= 1.05 x the floor", value=ratio, met=ratio <= 1.05),
    ]
    for name, timing in timings.items():
        if name not in {"resident", "hostweights"}:
            slower = timing.seconds / ours.seconds
            goals.append(Goal(id=f"slower: {name}", goal="> 1", value=slower, met=slower > 1.0))
    return goals


def _build(config: dict[str, object]) -> nn.Module:
    module: nn.Module = importlib.import_module("diffusers").Flux2Transformer2DModel(**config)
    return module.to(torch.bfloat16)


def _load(config: dict[str, object], checkpoint: Path) -> nn.Module:
    with torch.device("meta"):
        module = _build(config)
    module.load_state_dict(load_file(checkpoint), assign=True)
    return module.requires_grad_(False).eval()


def _inputs(config: dict[str, object], image: int, text: int, device: str) -> dict[str, object]:
    generator = torch.Generator("cpu").manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

    channels, joint = config["in_channels"], config["joint_attention_dim"]
    assert isinstance(channels, int)
    assert isinstance(joint, int)
    return {
        "hidden_states": drawn(1, image, channels),
        "encoder_hidden_states": drawn(1, text, joint),
        "timestep": torch.full((1,), 0.5, dtype=torch.bfloat16, device=device),
        "img_ids": _ids(image, device),
        "txt_ids": _ids(text, device),
        "guidance": None,
        "return_dict": False,
    }


def _ids(count: int, device: str) -> torch.Tensor:
    ids = torch.zeros(1, count, 4, device=device)
    ids[0, :, 3] = torch.arange(count, device=device)
    return ids
