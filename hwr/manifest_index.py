"""What every user of a manifest needs to find in it, worked out once: its tensors by name, and by form.

Models have few forms of tensors, and many tensors of each. What can be asked of a form is asked once, not per tensor.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ..messages.dtypes import DType
from ..messages.manifest import Manifest, TensorEntry

Form = tuple[str, tuple[int, ...], tuple[int, ...], DType]
"""(file, shape, stride, dtype)."""


class ManifestIndex(Struct, frozen=True):
    """The stored tensors of one manifest: ``by_name`` without aliases, ``by_form`` in file order within each form."""

    by_name: Mapping[str, TensorEntry]
    by_form: Mapping[Form, Sequence[TensorEntry]]


def index_manifest(manifest: Manifest) -> ManifestIndex:
    """Index a manifest, whatever it says; of two tensors of one name the last one stands in ``by_name``."""
    by_form: dict[Form, list[TensorEntry]] = defaultdict(list)
    for tensor in manifest.tensors:
        by_form[tensor.file, tensor.shape, tensor.stride, tensor.dtype].append(tensor)
    return ManifestIndex({tensor.name: tensor for tensor in manifest.tensors}, dict(by_form))
