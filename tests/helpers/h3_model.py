"""A reduced MiniMax H3: the tensor names and layouts of the real one, few and small blocks."""

import math

import torch
from torch import nn
from torch.nn import functional

from hostweights.hwr.models.minimax_h3 import FP32_MODULES

HEADS, HEAD_DIM, HIDDEN, INNER = 4, 8, 16, 24


class Holder(nn.Module):
    """Named children and nothing else."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class H3Attention(nn.Module):
    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(HIDDEN, 3 * heads * HEAD_DIM, bias=False)
        self.out_proj = nn.Linear(heads * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM)
        self.k_norm = nn.RMSNorm(HEAD_DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2) for part in self.qkv_proj(x).chunk(3, -1))
        q, k = self.q_norm(q), self.k_norm(k)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM), -1) @ v
        result: torch.Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return result


class H3Mlp(nn.Module):
    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN, 2 * inner, bias=False)
        self.fc2 = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(x).chunk(2, -1)
        result: torch.Tensor = self.fc2(functional.silu(gate) * up)
        return result


class H3RefinerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(HIDDEN)
        self.attn = H3Attention()
        self.norm2 = nn.RMSNorm(HIDDEN)
        self.mlp = H3Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class H3Block(H3RefinerBlock):
    """With its own modulation, of which this reduced model uses the shifts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.adaln_proj = Holder(linear=nn.Linear(HIDDEN, 2 * HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, after = self.adaln_proj.get_submodule("linear")(x.mean(1, keepdim=True)).chunk(2, -1)
        result: torch.Tensor = super().forward(x + before) + after
        return result


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10_000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))


class H3(nn.Module):
    """BF16 but for the twelve parameters and the buffer that stay in FP32."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.video_patch_proj = nn.Linear(6, HIDDEN)
        self.audio_patch_proj = nn.Linear(5, HIDDEN)
        self.time_embedder = Holder(proj_in=nn.Linear(4, HIDDEN), proj_out=nn.Linear(HIDDEN, HIDDEN))
        self.condition_proj = nn.Linear(3, HIDDEN)
        self.token_refiner = Holder(blocks=nn.ModuleList(H3RefinerBlock() for _ in range(2)))
        self.rope = Rope()
        self.blocks = nn.ModuleList(H3Block() for _ in range(blocks))
        self.final_layer = Holder(
            norm=nn.RMSNorm(HIDDEN),
            adaln_proj=Holder(linear=nn.Linear(HIDDEN, 2 * HIDDEN)),
            video_out=nn.Linear(HIDDEN, 6),
            audio_out=nn.Linear(HIDDEN, 5),
        )
        for name, parameter in self.named_parameters():
            if not name.startswith(FP32_MODULES):
                parameter.data = parameter.data.to(torch.bfloat16)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        x = self.video_patch_proj(video).bfloat16()
        for block in (*self.token_refiner.get_submodule("blocks").children(), *self.blocks):
            x = block(x)
        result: torch.Tensor = self.final_layer.get_submodule("video_out")(x.float())
        return result


def h3_checkpoint_state(model: H3) -> dict[str, torch.Tensor]:
    """The model's state as the checkpoint stores it: the rows of Q, K and V head by head."""
    state = dict(model.state_dict())
    for name, tensor in state.items():
        if name.endswith("attn.qkv_proj.weight"):
            q, k, v = (part.unflatten(0, (HEADS, HEAD_DIM)) for part in tensor.chunk(3))
            state[name] = torch.stack([q, k, v], 1).flatten(0, 2)
    return state
