// Copies rows from one dtype and pitch to another: float32 or half to half with padding, and half back to float32 or half.
// Bound by memory bandwidth alone. A warp processes a row, PER_THREAD x 32 adjacent groups of numbers at a time, so that both its
// reads and its writes are contiguous. All reads are issued before the first write.
//
// Compile-time constant, set by the host: FP16.

#include "half.cuh"

#define THREADS 256
#define PER_THREAD 4
#define TILE (32 * PER_THREAD)  // groups

__device__ __forceinline__ void convert(float from, u16& to) { to = (u16)pack(from, 0.0f); }
__device__ __forceinline__ void convert(u16 from, u16& to) { to = from; }
__device__ __forceinline__ void convert(u16 from, float& to) {
    float unused;
    unpack(from, to, unused);
}

template <typename Number, int GROUP>
struct alignas(sizeof(Number) * GROUP) Group {
    Number each[GROUP];
};

// Columns from `width` to `filled` are zeroed. Both are multiples of GROUP, and so are the pitches. Several blocks may share rows (grid y).
template <typename From, typename To, int GROUP>
__device__ __forceinline__ void cast(const From* __restrict__ from, To* __restrict__ to, int rows, int width, int filled, int from_pitch, int to_pitch) {
    u32 row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    from += (u64)row * from_pitch;
    to += (u64)row * to_pitch;
    for (int first = blockIdx.y * TILE * GROUP; first < filled; first += gridDim.y * TILE * GROUP) {
        int column = first + threadIdx.x % 32 * GROUP;
        Group<From, GROUP> read[PER_THREAD] = {};
#pragma unroll
        for (int n = 0; n < PER_THREAD; n++) {
            int at = column + n * 32 * GROUP;
            if (at < width) read[n] = *(const Group<From, GROUP>*)(from + at);
        }
#pragma unroll
        for (int n = 0; n < PER_THREAD; n++) {
            int at = column + n * 32 * GROUP;
            Group<To, GROUP> written;
#pragma unroll
            for (int each = 0; each < GROUP; each++) convert(read[n].each[each], written.each[each]);
            if (at < filled) *(Group<To, GROUP>*)(to + at) = written;
        }
    }
}

#define KERNEL(NAME, FROM, TO, GROUP)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_##GROUP(                                                   \
        const FROM* from, TO* to, int rows, int width, int filled, int from_pitch, int to_pitch) {                          \
        cast<FROM, TO, GROUP>(from, to, rows, width, filled, from_pitch, to_pitch);                                         \
    }
#define KERNELS(NAME, FROM, TO) KERNEL(NAME, FROM, TO, 1) KERNEL(NAME, FROM, TO, 2) KERNEL(NAME, FROM, TO, 4)

KERNELS(narrow, float, u16)
KERNELS(move, u16, u16)
KERNELS(widen, u16, float)
