"""The canonical load of weights that are not what the checkpoint holds: from the producer that would publish them."""

from torch import nn

from ..messages.budget import Budget
from .contract import Producer
from .module_tensors import bind, places
from .ownership import tensor_groups
from .subclasses import reassemble


def load_produced(module: nn.Module, producer: Producer, budget: Budget) -> int:
    """Fill a skeleton with what a producer makes of a checkpoint; returns the bytes that it now holds.

    The module is touched only after all were made. Raises what the producer raises.
    """
    groups = tensor_groups(module)
    pairs = zip(producer.plan.tensors, producer.produce(budget), strict=True)
    made = {spec.name: tensor.clone() for spec, tensor in pairs}  # the producer may use its memory again
    for name, group in groups.items():
        bind(group, made[name])
    reassemble(places(module))
    return sum(tensor.nbytes for tensor in made.values())
