"""Quantised models for the tests: torchao's own types on the CPU, and one class with strides that nobody expects."""

import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from hostweights import Representation

WIDTH, HIDDEN, BLOCKS = 64, 128, 3

REPRESENTATIONS = {
    Representation.FP8: "fp8 per tensor, dynamic",
    Representation.FP8_ROW: "fp8 per row, dynamic",
}
"""By the scheme of ``torchao_schemes`` that they are."""


class Rule(Enum):
    """Something a context may keep."""

    LAST = 1


class Options(NamedTuple):
    """Something a context may keep."""

    rule: Rule = Rule.LAST
    limit: float | None = 0.5


class Halved(torch.Tensor):
    """Keeps its values as a transposed tensor and a scale, and shows their product."""

    _hostweights_layout = "halved-1"
    turned: torch.Tensor
    scale: torch.Tensor
    options: Options

    def __new__(cls, turned: torch.Tensor, scale: torch.Tensor, options: Options) -> Self:
        del options
        return torch.Tensor._make_wrapper_subclass(
            cls, turned.shape, dtype=scale.dtype, device=turned.device, requires_grad=False
        )

    def __init__(self, turned: torch.Tensor, scale: torch.Tensor, options: Options) -> None:
        self.turned, self.scale, self.options = turned, scale, options

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["turned", "scale"], {"options": self.options, "dtype": self.scale.dtype, "sizes": (1, [2])}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], size: torch.Size, stride: tuple[int, ...]
    ) -> "Halved":
        del size, stride
        return Halved(inner["turned"], inner["scale"], context["options"])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.turned.to(weight.scale.dtype) * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub forgets that it is a class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types, kwargs
        if func in {torch.ops.aten.detach.default, torch.ops.aten.alias.default}:
            return Halved(args[0].turned.detach(), args[0].scale.detach(), args[0].options)
        raise NotImplementedError(str(func))


def halved(weight: torch.Tensor, options: Options | None = None) -> Halved:
    turned = torch.empty(weight.shape[::-1], dtype=torch.int8, device=weight.device).t()
    turned.copy_((weight * 100).clamp(-127, 127))
    return Halved(turned, torch.full((), 0.01, device=weight.device), options or Options())


Quantise = Callable[[torch.Tensor], torch.Tensor]


def torchao_schemes() -> dict[str, Quantise]:
    """How each of torchao's types is made of a weight, on the CPU and on meta alike."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8.inference import Float8MMConfig
        from torchao.quantization import (
            Float8Tensor,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            PerGroup,
            PerRow,
            PerTensor,
            quantize_,
        )
        from torchao.quantization.quantize_.common import KernelPreference
        from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs

    def dynamic(granularity: Any) -> Quantise:
        kernel = KernelPreference.TORCH
        return lambda weight: Float8Tensor.from_hp(
            weight,
            granularity=granularity,
            mm_config=Float8MMConfig(),
            kernel_preference=kernel,
            act_quant_kwargs=QuantizeTensorToFloat8Kwargs(
                granularity=granularity, mm_config=Float8MMConfig(), kernel_preference=kernel
            ),
        )

    def configured(config: Any) -> Quantise:
        def quantise(weight: torch.Tensor) -> torch.Tensor:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            quantize_(linear, config)
            return linear.weight.data

        return quantise

    return {
        "fp8 per tensor, dynamic": dynamic(PerTensor()),
        "fp8 per row, dynamic": dynamic(PerRow()),
        "fp8 per row, weight only": lambda weight: Float8Tensor.from_hp(weight, granularity=PerRow()),
        "int8 weight only": configured(Int8WeightOnlyConfig(set_inductor_config=False)),
        "int4 weight only": configured(
            IntxWeightOnlyConfig(weight_dtype=vars(torch)["int4"], granularity=PerGroup(32))
        ),
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    """Blocks between two plain projections."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def quantised(module: Stack, quantise: Quantise) -> Stack:
    """The model with the weights of its blocks' projections, and of its entry, replaced."""
    for linear in [module.entry, *(each for block in module.blocks for each in (block.up, block.down))]:
        assert isinstance(linear, nn.Linear)
        linear.weight = nn.Parameter(quantise(linear.weight.detach()), requires_grad=False)
    return module


def factory() -> nn.Module:
    return Stack().to(torch.bfloat16)


def in_memory(representation: Representation, device: str = "cpu") -> Stack:
    """What torchao makes of the loaded model."""
    quantise = torchao_schemes()[REPRESENTATIONS[representation]]
    model = plain_stack().to(device)
    for block in model.blocks:
        assert isinstance(block, Block)
        for linear in (block.up, block.down):
            linear.weight = nn.Parameter(quantise(linear.weight.detach()), requires_grad=False)
    return model


def plain_stack(dtype: torch.dtype = torch.bfloat16) -> Stack:
    torch.manual_seed(0)
    return Stack().to(dtype).requires_grad_(False)


def skeleton(quantise: Quantise, dtype: torch.dtype = torch.bfloat16) -> Stack:
    with torch.device("meta"):
        return quantised(Stack().to(dtype).requires_grad_(False), quantise)


X = torch.linspace(-1, 1, 32 * WIDTH).reshape(32, WIDTH)


def run(module: nn.Module) -> torch.Tensor:
    """In the dtype and on the device of the head, which is no block."""
    with torch.inference_mode():
        out: torch.Tensor = module(X.to(next(iter(module.head.parameters()))))  # type: ignore[union-attr]
        return out.clone()
