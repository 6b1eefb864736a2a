"""What a block's parameters hold: a slot's views while the block is used, their host tensors otherwise."""

from collections.abc import Callable, Mapping, Sequence

import torch

from ..messages.failure import Code, Stage, error
from ..messages.plan import BlockPlan
from .layout import check_matches, in_mode
from .parts import mapped


class BlockBinding:
    """The streamed parameters of one block. Not thread-safe: the driver's lock guards it.

    Parameter objects keep their identity; only ``data`` changes, to views that exist already.
    """

    def __init__(self, path: str, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self.path = path
        self._names = tuple(names)
        self._parameters = tuple(parameters)
        self._inference = tuple(parameter.is_inference() for parameter in parameters)
        self._parked: tuple[torch.Tensor, ...] = tuple(parameter.data for parameter in parameters)
        self._bound: Sequence[torch.Tensor] | None = None
        self._seen = self._fingerprint()

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The streamed parameters, or the parts of those that are made of other tensors."""
        return self._parameters

    @property
    def names(self) -> Sequence[str]:
        """Of the streamed parameters, from the root."""
        return self._names

    @property
    def bound(self) -> bool:
        """Whether the parameters show a slot."""
        return self._bound is not None

    def arrange(self, plan: BlockPlan, parked: Sequence[torch.Tensor]) -> tuple[BlockPlan, tuple[torch.Tensor, ...]]:
        """A backing's plan and host tensors in this binding's order of names.

        Raises HostWeightsError: coverage_incomplete if a parameter is missing, shape_mismatch if one differs.
        """
        place = {tensor.name: index for index, tensor in enumerate(plan.tensors)}
        for name, current in zip(self._names, self._parked, strict=True):
            if name not in place:
                raise error(
                    Stage.TRANSPORT,
                    Code.COVERAGE_INCOMPLETE,
                    f"the backing's block {plan.name!r} has no parameter {name!r}, which block {self.path!r} streams",
                    tensor=name,
                )
            check_matches(plan.tensors[place[name]], current)
            check_matches(plan.tensors[place[name]], parked[place[name]])
        order = [place[name] for name in self._names]
        tensors = tuple(plan.tensors[index] for index in order)
        arranged = BlockPlan(name=plan.name, size_bytes=plan.size_bytes, tensors=tensors)
        return arranged, self.adapt([parked[index] for index in order])

    def adapt(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors, made fit to be the parameters' ``data``, over the same memory."""
        pairs = zip(tensors, self._inference, strict=True)
        return tuple(in_mode(tensor, inference=inference) for tensor, inference in pairs)

    def bind(self, views: Sequence[torch.Tensor]) -> None:
        """Show a slot."""
        if self._bound is not views:
            for parameter, view in zip(self._parameters, views, strict=True):
                parameter.data = view
            self._bound = views

    def park(self) -> None:
        """Show the host tensors, whatever is shown now."""
        for parameter, tensor in zip(self._parameters, self._parked, strict=True):
            parameter.data = tensor
        self._bound = None
        self._seen = self._fingerprint()

    def move_home(self, parked: Sequence[torch.Tensor]) -> None:
        """Change the host tensors; a block in use shows them after its use."""
        self._parked = tuple(parked)
        if self._bound is None:
            self.park()

    def drop(self) -> None:
        """Let go of all storage."""
        self.move_home([tensor.new_empty(0) for tensor in self._parked])

    def check_untouched(self) -> None:
        """Raise HostWeightsError(unsupported) if somebody replaced or wrote the parameters since they were parked.

        Such a change would be lost: what computes is the published bytes. A write through ``data`` is not seen.
        """
        if self._bound is None and self._seen != self._fingerprint():
            raise error(
                Stage.TRANSPORT,
                Code.UNSUPPORTED,
                f"parameters of block {self.path!r} ({self._names[0]!r}, ...) were moved, converted or written while "
                "the block is streamed, and the change would have no effect: detach the model (not terminal), change "
                "it, then attach it again",
                block=self.path,
            )

    def at_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host tensor of a streamed parameter's current value; any other tensor is given back as it is."""
        if self._bound is None:
            return tensor
        homes = {view.data_ptr(): parked for view, parked in zip(self._bound, self._parked, strict=True)}
        return mapped(tensor, lambda part: homes.get(part.data_ptr(), part))

    def restore_values(
        self, state_dict: dict[str, object], prefix: str, restored: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        """Put real values in place of a slot's views or stand-ins in a state dict; made only if one is there."""
        shown = self._parked if self._bound is None else (*self._bound, *self._parked)
        names = {tensor.data_ptr(): name for tensor, name in zip(shown, self._names * 2, strict=False)}
        found = {
            key: names[value.data_ptr()]
            for key, value in state_dict.items()
            if key.startswith(prefix) and isinstance(value, torch.Tensor) and value.data_ptr() in names
        }
        values = restored() if found else {}
        state_dict.update({key: values[name] for key, name in found.items()})

    def _fingerprint(self) -> list[int]:
        prints = [parameter.data_ptr() for parameter in self._parameters]
        return prints + [_version(parameter) for parameter in self._parameters]


def _version(parameter: torch.Tensor) -> int:
    """Rises with each in-place write and not when ``data`` is set; parameters made in inference mode have none."""
    try:
        return parameter._version  # noqa: SLF001 - documented with autograd, under this name only
    except RuntimeError:
        return 0
