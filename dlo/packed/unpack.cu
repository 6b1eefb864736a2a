// Unpacks one block's packed extent into its slot, as messages/packed.py lays the parts out.
//
// A thread block takes chunks of 16384 elements (or of 32768 bytes that are stored plain), each by itself: codes first,
// then, behind a barrier, the chunk's escapes over them. Offsets were compared with both memories before the launch and
// are multiples of 256. What is read from the extent itself (table, escapes) is bounded here: no value of it can move a
// write out of its chunk.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 CHUNK = 16384;
constexpr u32 UNROLL = 4;
constexpr u32 VECTOR = 8;  // elements, 16 bytes unpacked

struct Tensor {
    u64 first_chunk;  // of the whole block's chunks
    u64 elements;     // bytes / 2, rounded up, if stored plain
    u64 width;        // 0 if stored plain
    u64 size_bytes;   // unpacked
    u64 target;
    u64 sign_mantissa;  // the bytes themselves if stored plain
    u64 codes;
    u64 codes_high;
    u64 table;
    u64 escapes;
    u64 starts;
    u64 positions;
    u64 exponents;
};

struct Loaded {
    uint2 mixed;  // eight bytes of sign and mantissa
    u32 codes;    // eight codes: in nibbles (width 4), or low bits in the lower half and high bits above (width 3)
};

__device__ inline u32 spread_pairs(u32 x) {
    x = (x | (x << 8)) & 0x00FF00FFu;
    x = (x | (x << 4)) & 0x0F0F0F0Fu;
    return (x | (x << 2)) & 0x33333333u;
}

__device__ inline u32 spread_bits(u32 x) {
    x = (x | (x << 12)) & 0x000F000Fu;
    x = (x | (x << 6)) & 0x03030303u;
    return (x | (x << 3)) & 0x11111111u;
}

// Puts a byte of sign and mantissa (low) and one of exponent (high) in each half of a word in order.
__device__ inline u32 join(u32 word) {
    return ((word >> 1) & 0x7F807F80u) | (word & 0x007F007Fu) | ((word & 0x00800080u) << 8);
}

template <int WIDTH>
__device__ inline u32 exponents_of(const uint4& table, u32 nibbles) {
    if (WIDTH == 3) return __byte_perm(table.x, table.y, nibbles);
    const u32 place = nibbles & 0x7777u;
    const u32 lower = __byte_perm(table.x, table.y, place), upper = __byte_perm(table.z, table.w, place);
    return __byte_perm(lower, upper, 0x3210u | ((nibbles & 0x8888u) >> 1));
}

template <int WIDTH>
__device__ inline Loaded load(const u8* mixed, const u8* codes, const u8* high, u32 vector) {
    Loaded found;
    found.mixed = __ldcs(reinterpret_cast<const uint2*>(mixed) + vector);
    if (WIDTH == 4) {
        found.codes = __ldcs(reinterpret_cast<const u32*>(codes) + vector);
    } else {
        found.codes = __ldcs(reinterpret_cast<const u16*>(codes) + vector) | (u32(__ldcs(high + vector)) << 16);
    }
    return found;
}

template <int WIDTH>
__device__ inline uint4 unpack_vector(const uint4& table, const Loaded& from) {
    u32 nibbles = from.codes;
    if (WIDTH == 3) nibbles = spread_pairs(from.codes & 0xFFFFu) | (spread_bits(from.codes >> 16) << 2);
    const u32 lower = exponents_of<WIDTH>(table, nibbles & 0xFFFFu), upper = exponents_of<WIDTH>(table, nibbles >> 16);
    uint4 made;
    made.x = join(__byte_perm(from.mixed.x, lower, 0x5140u));
    made.y = join(__byte_perm(from.mixed.x, lower, 0x7362u));
    made.z = join(__byte_perm(from.mixed.y, upper, 0x5140u));
    made.w = join(__byte_perm(from.mixed.y, upper, 0x7362u));
    return made;
}

__device__ inline u16 element(u32 mixed, u32 exponent) {
    return u16(((mixed & 0x80u) << 8) | (exponent << 7) | (mixed & 0x7Fu));
}

template <int WIDTH>
__device__ inline void unpack_codes(const u8* mixed, const u8* codes, const u8* high, const uint4& table, u16* out,
                                    u32 elements) {
    const u32 vectors = elements / VECTOR, step = blockDim.x;
    uint4* target = reinterpret_cast<uint4*>(out);
    for (u32 first = threadIdx.x; first < vectors; first += UNROLL * step) {
        Loaded loaded[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i)
            if (first + i * step < vectors) loaded[i] = load<WIDTH>(mixed, codes, high, first + i * step);
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i)
            if (first + i * step < vectors) target[first + i * step] = unpack_vector<WIDTH>(table, loaded[i]);
    }
    const u32 words[4] = {table.x, table.y, table.z, table.w};
    for (u32 at = vectors * VECTOR + threadIdx.x; at < elements; at += step) {
        u32 code;
        if (WIDTH == 4) code = (codes[at / 2] >> (4 * (at % 2))) & 0xFu;
        else code = ((codes[at / 4] >> (2 * (at % 4))) & 0x3u) | (((high[at / 8] >> (at % 8)) & 0x1u) << 2);
        out[at] = element(mixed[at], (words[code / 4] >> (8 * (code % 4))) & 0xFFu);
    }
}

// A thread's first escape of a chunk, read while the codes are still being unpacked; position CHUNK if it has none.
struct Escape {
    u64 at, end;
    u32 position;
    u32 exponent;
};

__device__ inline Escape first_escape(const u8* packed, const Tensor& tensor, u64 chunk) {
    const u32* starts = reinterpret_cast<const u32*>(packed + tensor.starts);
    const u64 begin = starts[chunk], found = starts[chunk + 1];
    Escape escape = {begin + threadIdx.x, found < tensor.escapes ? found : tensor.escapes, CHUNK, 0};
    if (escape.at < escape.end) {
        escape.position = reinterpret_cast<const u16*>(packed + tensor.positions)[escape.at];
        escape.exponent = (packed + tensor.exponents)[escape.at];
    }
    return escape;
}

__device__ inline void put_escapes(const u8* packed, const Tensor& tensor, Escape escape, const u8* mixed, u16* out,
                                   u32 elements) {
    const u16* positions = reinterpret_cast<const u16*>(packed + tensor.positions);
    const u8* exponents = packed + tensor.exponents;
    while (escape.at < escape.end) {
        if (escape.position < elements) out[escape.position] = element(mixed[escape.position], escape.exponent);
        escape.at += blockDim.x;
        if (escape.at < escape.end) {
            escape.position = positions[escape.at];
            escape.exponent = exponents[escape.at];
        }
    }
}

__device__ inline void copy_plain(const u8* source, u8* target, u32 size_bytes) {
    const u32 vectors = size_bytes / 16;
    for (u32 at = threadIdx.x; at < vectors; at += blockDim.x)
        reinterpret_cast<uint4*>(target)[at] = __ldcs(reinterpret_cast<const uint4*>(source) + at);
    for (u32 at = vectors * 16 + threadIdx.x; at < size_bytes; at += blockDim.x) target[at] = source[at];
}

__device__ inline void unpack_chunk(const u8* packed, u8* slot, const Tensor& tensor, u64 chunk) {
    const u64 first = chunk * CHUNK;
    const u8* mixed = packed + tensor.sign_mantissa + first;
    if (tensor.width == 0) {
        const u64 left = tensor.size_bytes - 2 * first;
        copy_plain(mixed + first, slot + tensor.target + 2 * first, left < 2 * CHUNK ? u32(left) : 2 * CHUNK);
        return;
    }
    const u64 left = tensor.elements - first;
    const u32 elements = left < CHUNK ? u32(left) : CHUNK;
    u16* out = reinterpret_cast<u16*>(slot + tensor.target) + first;
    Escape escape = {0, 0, CHUNK, 0};
    if (tensor.escapes) escape = first_escape(packed, tensor, chunk);
    uint4 table = {0, 0, 0, 0};
    if (tensor.width == 4) {
        table = *reinterpret_cast<const uint4*>(packed + tensor.table);
        unpack_codes<4>(mixed, packed + tensor.codes + first / 2, packed, table, out, elements);
    } else {
        const uint2 half = *reinterpret_cast<const uint2*>(packed + tensor.table);
        table.x = half.x;
        table.y = half.y;
        unpack_codes<3>(mixed, packed + tensor.codes + first / 4, packed + tensor.codes_high + first / 8, table, out,
                        elements);
    }
    if (tensor.escapes == 0) return;  // for all threads of the block alike
    __syncthreads();
    put_escapes(packed, tensor, escape, mixed, out, elements);
}

extern "C" __global__ void __launch_bounds__(256) hostweights_unpack(const u8* packed, u8* slot, const Tensor* tensors,
                                                                     u32 count, u64 chunks) {
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        u32 low = 0, high = count;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (tensors[middle].first_chunk <= chunk) low = middle;
            else high = middle;
        }
        unpack_chunk(packed, slot, tensors[low], chunk - tensors[low].first_chunk);
    }
}
