"""Fuzz target: the decoder of packed tensors, on parts that nobody wrote; see README.md beside this file.

The input's first bytes choose elements, width and escapes; the rest fills the parts. Anything but a HostWeightsError
fails the run, and so does a decoded tensor that packs into other bits.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hostweights"]):
    import torch

    from hostweights.hwr.packed.codec import pack, unpack
    from hostweights.hwr.packed.form import Form
    from hostweights.messages.failure import HostWeightsError
    from hostweights.messages.packed import Part, part_sizes

MOST_ELEMENTS = 70_000


def check(data: bytes) -> None:
    """One input."""
    found = atheris.FuzzedDataProvider(data)
    elements, width = found.ConsumeIntInRange(0, MOST_ELEMENTS), found.ConsumeIntInRange(2, 5)
    escapes = found.ConsumeIntInRange(0, min(elements + 1, 64))
    parts: dict[Part, torch.Tensor] = {}
    for part, size in part_sizes(elements, width, escapes).items():
        memory = torch.zeros(size, dtype=torch.uint8)
        given = found.ConsumeBytes(min(size, 256))
        if given:
            memory[: len(given)] = torch.frombuffer(bytearray(given), dtype=torch.uint8)
        parts[part] = memory
    if found.ConsumeBool():  # a table that random bytes would hardly ever be
        parts[Part.TABLE].copy_(torch.arange(parts[Part.TABLE].numel()).add_(found.ConsumeIntInRange(0, 224)))
    bits = torch.zeros(elements, dtype=torch.int16)
    try:
        unpack(parts, elements, width, escapes, bits)
    except HostWeightsError:
        return
    table = tuple(parts[Part.TABLE].tolist())
    exponents = (bits.to(torch.int32) >> 7) & 0xFF
    rare = int(torch.isin(exponents, torch.tensor(table), invert=True).sum())
    again = torch.empty_like(bits)
    unpack(pack(bits, Form(width, table, rare)), elements, width, rare, again)
    assert torch.equal(again, bits), "packed anew, the tensor is another one"


def main() -> None:
    """Run libFuzzer with the command line's options."""
    for folder in (argument for argument in sys.argv[1:] if not argument.startswith("-")):
        Path(folder).mkdir(parents=True, exist_ok=True)
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
