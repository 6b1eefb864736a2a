"""One start of the startup suite: ``python -m benchmarks.startup_worker WAY SPAWNED_S MODEL_DIRECTORY STORE``.

``SPAWNED_S`` is the monotonic clock just before the process was made. Prints a JSON line: what each phase took up to
the first output, in seconds and in order, and the first numbers of that output.
"""

import time

BEGUN_S = time.monotonic()  # before any import that counts

import importlib  # noqa: E402 - see above
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


class Phases:
    """Seconds from one mark to the next."""

    def __init__(self, spawned_s: float) -> None:
        self._last_s = BEGUN_S
        self.seconds = {"interpreter": BEGUN_S - spawned_s}

    def mark(self, name: str) -> None:
        """Everything since the last mark was this."""
        now_s = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s


def hostweights_encoder(phases: Phases, model: Path, store: Path) -> Any:  # noqa: ANN401 - whatever it computes
    """The demo's encoder from the store, blocks streamed."""
    import torch

    phases.mark("import torch")
    from hostweights import BERT_ENCODER, Config, Mode, open_sync

    phases.mark("import hostweights")
    from hostweights.demo.encoder import Encoder, read_config

    config = read_config(model)
    phases.mark("import the model")
    with open_sync(Config(root=str(store), mode=Mode.REQUIRED)) as host:
        phases.mark("open")
        loaded = host.load(lambda: Encoder(config), model, record=BERT_ENCODER)
        phases.mark("load")
        host.attach(loaded)
        phases.mark("attach")
        output = _forward(loaded.module, torch)
        phases.mark("first forward")
        return output


def hostweights_apart(phases: Phases, model: Path, store: Path) -> Any:  # noqa: ANN401
    """The same load by hand, so that its parts can be told apart: no actors, no streaming."""
    import torch

    phases.mark("import torch")
    from hostweights import BERT_ENCODER, Config
    from hostweights.hwr.budget import PlainBudget
    from hostweights.hwr.lease import ArtifactLease
    from hostweights.hwr.ownership import survey
    from hostweights.hwr.producers import identity_for
    from hostweights.hwr.restore import plan_restore
    from hostweights.hwr.skeleton import build_skeleton
    from hostweights.hwr.source_memory import SourceMemory, source_fingerprint
    from hostweights.hwr.store import LocalStore

    phases.mark("import hostweights")
    from hostweights.demo.encoder import Encoder, read_config

    shape = read_config(model)
    phases.mark("import the model")
    config, budget = Config(root=str(store)), PlainBudget()
    opened = LocalStore.open(store, config.wait, budget)
    phases.mark("open the store")
    module = build_skeleton(lambda: Encoder(shape))
    phases.mark("skeleton")
    found = survey(module, BERT_ENCODER)
    digest = SourceMemory(store / "digests" / "sources").find(source_fingerprint(model))
    assert digest is not None
    identity = identity_for(BERT_ENCODER, found.ownership, digest, "Encoder")
    phases.mark("identity")
    lease = opened.lookup(identity, config.validation, budget, lease_id="startup")
    assert isinstance(lease, ArtifactLease)
    phases.mark("lookup")
    plan_restore(module, BERT_ENCODER, lease, found).commit()
    phases.mark("bind")
    output = _forward(module, torch)
    phases.mark("first forward")
    return output


def load_file_encoder(phases: Phases, model: Path, store: Path) -> Any:  # noqa: ANN401
    """The demo's encoder on meta, safetensors' mapping assigned to it: the least that a private start does."""
    del store
    import torch

    phases.mark("import torch")
    from safetensors.torch import load_file

    phases.mark("import safetensors")
    from hostweights.demo.encoder import Encoder, read_config

    config = read_config(model)
    phases.mark("import the model")
    with torch.device("meta"):
        module = Encoder(config)
    module.load_state_dict(load_file(model / "model.safetensors"), strict=False, assign=True)
    phases.mark("load")
    output = _forward(module, torch)
    phases.mark("first forward")
    return output


def hostweights_transformers(phases: Phases, model: Path, store: Path) -> Any:  # noqa: ANN401
    """transformers' own class, by directory, from the store."""
    return _by_directory(phases, model, store, "transformers")


def hostweights_diffusers(phases: Phases, model: Path, store: Path) -> Any:  # noqa: ANN401
    """diffusers' own class, by directory, from the store."""
    return _by_directory(phases, model, store, "diffusers")


def _by_directory(phases: Phases, model: Path, store: Path, library: str) -> Any:  # noqa: ANN401
    import torch

    phases.mark("import torch")
    from hostweights import Config, Mode, open_sync

    phases.mark("import hostweights")
    _import_model(library)
    phases.mark("import the model")
    with open_sync(Config(root=str(store), mode=Mode.REQUIRED)) as host:
        phases.mark("open")
        load = host.load_transformers if library == "transformers" else host.load_diffusers
        loaded = load(model)
        phases.mark("load")
        output = _forward(loaded.module, torch)
        phases.mark("first forward")
        return output


def transformers_stock(phases: Phases, model: Path, _: Path) -> Any:  # noqa: ANN401
    """``BertModel.from_pretrained``."""
    return _stock(phases, model, "transformers")


def diffusers_stock(phases: Phases, model: Path, _: Path) -> Any:  # noqa: ANN401
    """``Flux2Transformer2DModel.from_pretrained``."""
    return _stock(phases, model, "diffusers")


def _stock(phases: Phases, model: Path, library: str) -> Any:  # noqa: ANN401
    import torch

    phases.mark("import torch")
    kind = _import_model(library)
    phases.mark("import the model")
    dtype = {"torch_dtype": torch.bfloat16} if library == "diffusers" else {}
    module = kind.from_pretrained(model, **dtype).eval()
    phases.mark("load")
    output = _forward(module, torch)
    phases.mark("first forward")
    return output


def _import_model(library: str) -> Any:  # noqa: ANN401 - a class of an extra
    name = {"transformers": "BertModel", "diffusers": "Flux2Transformer2DModel"}[library]
    return getattr(importlib.import_module(library), name)


def _forward(module: Any, torch: Any) -> Any:  # noqa: ANN401
    """One forward of the smallest real input; the first numbers of what comes out."""
    with torch.inference_mode():
        if type(module).__name__ == "Flux2Transformer2DModel":
            config = module.config
            tokens, text = 4, 4
            axes = len(config.axes_dims_rope)
            out = module(
                hidden_states=torch.zeros(1, tokens, config.in_channels, dtype=torch.bfloat16),
                encoder_hidden_states=torch.zeros(1, text, config.joint_attention_dim, dtype=torch.bfloat16),
                timestep=torch.ones(1, dtype=torch.bfloat16),
                img_ids=torch.zeros(1, tokens, axes),
                txt_ids=torch.zeros(1, text, axes),
                return_dict=False,
            )[0]
        else:
            ids = torch.tensor([[101, 4937, 102]])
            out = module(ids, torch.ones_like(ids))
            out = getattr(out, "last_hidden_state", out)
        return out.float().flatten()[:4].tolist()


WAYS: dict[str, Callable[[Phases, Path, Path], Any]] = {
    "hostweights": hostweights_encoder,
    "hostweights, taken apart": hostweights_apart,
    "load_file": load_file_encoder,
    "hostweights transformers": hostweights_transformers,
    "transformers": transformers_stock,
    "hostweights diffusers": hostweights_diffusers,
    "diffusers": diffusers_stock,
}


if __name__ == "__main__":
    way, spawned_s, model, store = sys.argv[1:]
    phases = Phases(float(spawned_s))
    output = WAYS[way](phases, Path(model), Path(store))
    print(json.dumps({"phases": phases.seconds, "output": output}))
