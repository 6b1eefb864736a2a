// Unpacks the chunks from begin to end of one block's packed extent into its slot, as messages/packed.py lays the parts
// out.
//
// A thread block takes chunks of 16384 elements (or of 32768 bytes that are stored plain), each by itself. A chunk's
// escapes are put into shared memory first, and taken from there while the codes are unpacked, so that every element is
// written once. Offsets were compared with both memories before the launch and are multiples of 256. What is read from
// the extent itself (table, escapes) is bounded here: no value of it can move a write out of its chunk.

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

// The escapes of one chunk, if it has any: a byte of marks for each vector, and the exponents of the elements that are
// marked. Whoever takes a vector clears its marks, so that they are all clear before the next chunk's are set.
struct Escapes {
    u32 marks[CHUNK / 32];
    u32 exponents[CHUNK / 4];
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

// All ones in each byte whose bit of the lowest four is set.
__device__ inline u32 spread_marks(u32 marks) { return (((marks & 0xFu) * 0x00204081u) & 0x01010101u) * 0xFFu; }

// Puts the escaped ones among the exponents of a vector in their place.
__device__ inline void take_escapes(Escapes& escapes, u32 vector, u32& lower, u32& upper) {
    u8& marked = reinterpret_cast<u8*>(escapes.marks)[vector];
    const u32 marks = marked;
    if (marks == 0) return;
    marked = 0;
    const u32 low = spread_marks(marks), high = spread_marks(marks >> 4);
    lower = (lower & ~low) | (escapes.exponents[2 * vector] & low);
    upper = (upper & ~high) | (escapes.exponents[2 * vector + 1] & high);
}

template <int WIDTH>
__device__ inline uint4 unpack_vector(const uint4& table, const Loaded& from, Escapes* escapes, u32 vector) {
    u32 nibbles = from.codes;
    if (WIDTH == 3) nibbles = spread_pairs(from.codes & 0xFFFFu) | (spread_bits(from.codes >> 16) << 2);
    u32 lower = exponents_of<WIDTH>(table, nibbles & 0xFFFFu), upper = exponents_of<WIDTH>(table, nibbles >> 16);
    if (escapes) take_escapes(*escapes, vector, lower, upper);
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
__device__ inline void unpack_codes(const u8* mixed, const u8* codes, const u8* high, const uint4& table,
                                    Escapes* escapes, u16* out, u32 elements) {
    const u32 vectors = elements / VECTOR, step = blockDim.x;
    uint4* target = reinterpret_cast<uint4*>(out);
    for (u32 first = threadIdx.x; first < vectors; first += UNROLL * step) {
        Loaded loaded[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i)
            if (first + i * step < vectors) loaded[i] = load<WIDTH>(mixed, codes, high, first + i * step);
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i)
            if (first + i * step < vectors)
                target[first + i * step] = unpack_vector<WIDTH>(table, loaded[i], escapes, first + i * step);
    }
    const u32 words[4] = {table.x, table.y, table.z, table.w};
    for (u32 at = vectors * VECTOR + threadIdx.x; at < elements; at += step) {
        u32 code;
        if (WIDTH == 4) code = (codes[at / 2] >> (4 * (at % 2))) & 0xFu;
        else code = ((codes[at / 4] >> (2 * (at % 4))) & 0x3u) | (((high[at / 8] >> (at % 8)) & 0x1u) << 2);
        u32 exponent = (words[code / 4] >> (8 * (code % 4))) & 0xFFu;
        if (escapes && (reinterpret_cast<const u8*>(escapes->marks)[at / VECTOR] >> (at % VECTOR)) & 1u)
            exponent = reinterpret_cast<const u8*>(escapes->exponents)[at];
        out[at] = element(mixed[at], exponent);
    }
}

// Marks the escapes of a chunk; those past its own elements are left out.
__device__ inline void mark_escapes(Escapes& escapes, const u8* packed, const Tensor& tensor, u64 chunk, u32 elements) {
    const u32* starts = reinterpret_cast<const u32*>(packed + tensor.starts);
    const u16* positions = reinterpret_cast<const u16*>(packed + tensor.positions);
    const u8* exponents = packed + tensor.exponents;
    const u64 begin = starts[chunk], found = starts[chunk + 1], end = found < tensor.escapes ? found : tensor.escapes;
    __syncthreads();  // until the marks of the chunk before have been taken
    for (u64 at = begin + threadIdx.x; at < end; at += blockDim.x) {
        const u32 position = positions[at];
        if (position >= elements) continue;
        reinterpret_cast<u8*>(escapes.exponents)[position] = exponents[at];
        atomicOr(&escapes.marks[position / 32], 1u << (position % 32));
    }
    __syncthreads();
}

__device__ inline void copy_plain(const u8* source, u8* target, u32 size_bytes) {
    const u32 vectors = size_bytes / 16;
    for (u32 at = threadIdx.x; at < vectors; at += blockDim.x)
        reinterpret_cast<uint4*>(target)[at] = __ldcs(reinterpret_cast<const uint4*>(source) + at);
    for (u32 at = vectors * 16 + threadIdx.x; at < size_bytes; at += blockDim.x) target[at] = source[at];
}

__device__ inline void unpack_chunk(const u8* packed, u8* slot, const Tensor& tensor, u64 chunk, Escapes& shared) {
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
    Escapes* escapes = tensor.escapes ? &shared : nullptr;  // for all threads of the block alike
    if (escapes) mark_escapes(*escapes, packed, tensor, chunk, elements);
    uint4 table = {0, 0, 0, 0};
    if (tensor.width == 4) {
        table = *reinterpret_cast<const uint4*>(packed + tensor.table);
        unpack_codes<4>(mixed, packed + tensor.codes + first / 2, packed, table, escapes, out, elements);
    } else {
        const uint2 half = *reinterpret_cast<const uint2*>(packed + tensor.table);
        table.x = half.x;
        table.y = half.y;
        unpack_codes<3>(mixed, packed + tensor.codes + first / 4, packed + tensor.codes_high + first / 8, table, escapes,
                        out, elements);
    }
    if (escapes == nullptr || elements % VECTOR == 0) return;
    __syncthreads();  // several threads looked at the marks behind the last whole vector
    if (threadIdx.x == 0) reinterpret_cast<u8*>(escapes->marks)[elements / VECTOR] = 0;
}

extern "C" __global__ void __launch_bounds__(256, 5)
hostweights_unpack(const u8* packed, u8* slot, const Tensor* tensors, u32 count, u64 begin, u64 end) {
    __shared__ Escapes escapes;
    for (u32 at = threadIdx.x; at < CHUNK / 32; at += blockDim.x) escapes.marks[at] = 0;
    __syncthreads();
    for (u64 chunk = begin + blockIdx.x; chunk < end; chunk += gridDim.x) {
        u32 low = 0, high = count;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (tensors[middle].first_chunk <= chunk) low = middle;
            else high = middle;
        }
        unpack_chunk(packed, slot, tensors[low], chunk - tensors[low].first_chunk, escapes);
    }
}
