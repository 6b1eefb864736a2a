"""Tensors worth packing, every form of packing one, and the CUDA kernel's source run on the CPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hostweights.dlo.packed.cuda import SOURCE, Launch, describe
from hostweights.dlo.packed.plan import PLAIN, PackedBlock, PackedTensor
from hostweights.hwr.packed.codec import pack
from hostweights.hwr.packed.form import Form, exponent_counts
from hostweights.messages.packed import Part
from hostweights.messages.plan import BlockPlan

ALIGNMENT = 256

SHIM = """
#include <algorithm>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct dim { unsigned x; };
static thread_local dim threadIdx, blockIdx;
static dim blockDim, gridDim;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }
template <typename T> static T __ldcs(const T* from) { return *from; }
static void atomicOr(unsigned* at, unsigned bits) { __atomic_fetch_or(at, bits, __ATOMIC_RELAXED); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    unsigned char bytes[8];
    std::memcpy(bytes, &a, 4);
    std::memcpy(bytes + 4, &b, 4);
    unsigned made = 0;
    for (int i = 0; i < 4; ++i) made |= unsigned(bytes[(s >> (4 * i)) & 7]) << (8 * i);
    return made;
}
#include "unpack.cu"
extern "C" void launch(const u8* packed, u8* slot, const Tensor* tensors, u32 count, u64 begin, u64 end, u32 grid,
                       u32 block) {
    blockDim.x = block;
    gridDim.x = grid;
    for (u32 b = 0; b < grid; ++b) {
        pthread_barrier_init(&barrier, nullptr, block);
        std::vector<std::thread> threads;
        for (u32 t = 0; t < block; ++t)
            threads.emplace_back([=] {
                threadIdx.x = t;
                blockIdx.x = b;
                hostweights_unpack(packed, slot, tensors, count, begin, end);
            });
        for (auto& thread : threads) thread.join();
        pthread_barrier_destroy(&barrier);
    }
}
"""


def all_patterns() -> torch.Tensor:
    """All 65,536 bf16 values: NaN payloads, infinities, subnormals and both zeros among them."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)


def random_patterns(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-32768, 32768, (count,), dtype=torch.int32, generator=generator).to(torch.int16)


def gaussian(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 0.02).to(torch.bfloat16).view(torch.int16)


def every_form(bits: torch.Tensor) -> Iterator[Form]:
    """Both widths with the commonest exponents, and with the worst: those that occur least."""
    with ThreadPoolExecutor(2) as pool:
        counts = exponent_counts(bits, pool, 2).tolist()
    for width in (3, 4):
        for sign in (-1, 1):
            ranked = sorted(range(256), key=lambda exponent: (sign * counts[exponent], exponent))
            table = tuple(sorted(ranked[: 1 << width]))
            yield Form(width, table, bits.numel() - sum(counts[exponent] for exponent in table))


def lay_out_block(tensors: Sequence[tuple[torch.Tensor, Form | None]]) -> tuple[PackedBlock, torch.Tensor, int]:
    """A packed extent of int16 patterns, or of uint8 bytes stored plain: its plan, its bytes, and the slot's size."""
    pieces: list[tuple[int, torch.Tensor]] = []
    planned: list[PackedTensor] = []
    end = target = 0
    for index, (values, form) in enumerate(tensors):
        raw = {Part.SIGN_MANTISSA: values.view(torch.uint8)} if form is None else pack(values, form)
        parts = {}
        for part, piece in raw.items():
            parts[part] = (end, piece.numel())
            pieces.append((end, piece))
            end = -(-(end + piece.numel()) // ALIGNMENT) * ALIGNMENT
        width, escapes = (PLAIN, 0) if form is None else (form.width, form.escapes)
        planned.append(PackedTensor(f"t{index}", target, values.nbytes, width, escapes, parts))
        target = -(-(target + values.nbytes) // ALIGNMENT) * ALIGNMENT
    extent = aligned(end)
    for offset, piece in pieces:
        extent[offset : offset + piece.numel()] = piece
    plan = BlockPlan(name="block", size_bytes=target, tensors=())
    names = tuple(tensor.name for tensor in planned)
    return PackedBlock(plan, 0, "none", end, names, tuple(planned)), extent, target


def aligned(size_bytes: int) -> torch.Tensor:
    """Zeroed memory that starts at a multiple of 256 bytes."""
    memory = torch.zeros(size_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size_bytes]


class KernelOnCpu:
    """The kernel's own source, compiled as C++, each of its threads a thread."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("g++")
        assert compiler is not None
        shim, library = folder / "shim.cpp", folder / "shim.so"
        shim.write_text(SHIM)
        command = [compiler, "-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread"]
        command += ["-Wno-unknown-pragmas", f"-I{SOURCE.parent}", str(shim), "-o", str(library)]
        subprocess.run(command, check=True)
        self._launch = ctypes.CDLL(str(library)).launch

    def __call__(
        self, block: PackedBlock, extent: torch.Tensor, slot: torch.Tensor, planned: Sequence[Launch], threads: int
    ) -> None:
        """Run the launches, with so many threads in a thread block."""
        words, _ = describe(block)
        table = torch.tensor(words, dtype=torch.int64)
        addresses = [ctypes.c_void_p(each.data_ptr()) for each in (extent, slot, table)]
        count, width = ctypes.c_uint32(len(block.tensors)), ctypes.c_uint32(threads)
        for launch in planned:
            begin, end = ctypes.c_uint64(launch.begin), ctypes.c_uint64(launch.end)
            self._launch(*addresses, count, begin, end, ctypes.c_uint32(launch.thread_blocks), width)
