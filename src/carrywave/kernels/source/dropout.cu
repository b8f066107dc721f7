// Keyed dropout in one pass: the function of `random.py` (fold, bits and keep there), operation for operation, and the product with x.
// A warp processes a row or part of one: what depends only on the key, the time and the lane is computed once for all of its units.
//
// Compile-time constants, set by the host: WIDE (float32), otherwise FP16.

#include "half.cuh"

#define THREADS 256
#define PER_THREAD 8
#define TILE (32 * PER_THREAD)  // units

#if WIDE
typedef float Number;
#define ONE 1.0f
__device__ __forceinline__ Number times(Number x, float by) { return x * by; }
#else
typedef u16 Number;
#define ONE (FP16 ? 0x3C00 : 0x3F80)
__device__ __forceinline__ Number times(Number x, float by) {
    float wide, unused;
    unpack(x, wide, unused);
    return (u16)pack(wide * by, 0.0f);
}
#endif

template <int GROUP>
struct alignas(sizeof(Number) * GROUP) Group {
    Number each[GROUP];
};

__device__ __forceinline__ u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ x >> 16;
}

__device__ __forceinline__ void absorb(u32& a, u32& b, u32 word) {
    a = mix((a ^ word) * 0x9E3779B1u + b);
    b = mix(a ^ b ^ 0x7F4A7C15u);
}

// y = x times its multiplier, or the multiplier itself if x is null. y is dense [rows, units]; row n is step n / lanes and lane
// n % lanes. A number is kept if its bits, as an int, are at least `threshold`.
template <int GROUP>
__device__ __forceinline__ void drop(
    const Number* __restrict__ x, Number* __restrict__ y, const u32* __restrict__ key, const long long* __restrict__ lane_numbers, int rows, int lanes,
    int units, int step_pitch, int lane_pitch, u32 site, int timed, u32 start, int threshold, float scale) {
    u32 row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    u32 step = row / lanes, lane = row % lanes;
    u32 a = key[0], b = key[1];
    absorb(a, b, site);
    if (timed) absorb(a, b, start + step);
    absorb(a, b, lane_numbers ? (u32)lane_numbers[lane] : lane);
    x += x ? (u64)step * step_pitch + (u64)lane * lane_pitch : 0;
    y += (u64)row * units;
    for (int first = blockIdx.y * TILE; first < units; first += gridDim.y * TILE) {
        int mine = first + threadIdx.x % 32 * GROUP;
        Group<GROUP> read[PER_THREAD / GROUP];
#pragma unroll
        for (int n = 0; n < PER_THREAD / GROUP; n++) {
            int unit = mine + n * 32 * GROUP;
            if (x && unit < units) read[n] = *(const Group<GROUP>*)(x + unit);
        }
#pragma unroll
        for (int n = 0; n < PER_THREAD / GROUP; n++) {
            int unit = mine + n * 32 * GROUP;
            Group<GROUP> written;
#pragma unroll
            for (int each = 0; each < GROUP; each++) {
                u32 last = mix(unit + each + 0x9E3779B9u), bits = mix(mix(a ^ last) * (last | 1) + b);
                float by = (int)bits >= threshold ? scale : 0.0f;
                written.each[each] = times(x ? read[n].each[each] : (Number)ONE, by);
            }
            if (unit < units) *(Group<GROUP>*)(y + unit) = written;
        }
    }
}

// `scale` is passed as its bits, because the host passes only integers.
#define KERNEL(GROUP)                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) drop_##GROUP(                                                                    \
        const Number* x, Number* y, const u32* key, const long long* lane_numbers, int rows, int lanes, int units, int step_pitch,         \
        int lane_pitch, u32 site, int timed, u32 start, int threshold, u32 scale) {                                                        \
        float by = __uint_as_float(scale);                                                                                                 \
        drop<GROUP>(x, y, key, lane_numbers, rows, lanes, units, step_pitch, lane_pitch, site, timed, start, threshold, by);               \
    }

KERNEL(1)
KERNEL(2)
KERNEL(4)
KERNEL(8)

// Noise inside a cell as the recurrent kernels read it (see cell.cuh): a byte for each unit, lane and step, [rows, pitch]. Bit 0: the
// candidate stays; bits 1 and 2: h and the memory keep their old values. Each is drawn at a site of its own, the candidate without time if it
// is not `timed`. One warp per row, four units per thread.
extern "C" __global__ void __launch_bounds__(THREADS) noise_bytes(
    u32* bytes, const u32* key, const long long* lane_numbers, int rows, int lanes, int pitch, int timed, u32 start, u32 site_candidate,
    int threshold_candidate, u32 site_h, int threshold_h, u32 site_memory, int threshold_memory) {
    u32 row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    u32 step = row / lanes, lane = row % lanes;
    u32 site[3] = {site_candidate, site_h, site_memory}, a[3], b[3];
    int threshold[3] = {threshold_candidate, threshold_h, threshold_memory};
#pragma unroll
    for (int n = 0; n < 3; n++) {
        a[n] = key[0], b[n] = key[1];
        absorb(a[n], b[n], site[n]);
        if (n || timed) absorb(a[n], b[n], start + step);
        absorb(a[n], b[n], lane_numbers ? (u32)lane_numbers[lane] : lane);
    }
    bytes += (u64)row * (pitch / 4);
    for (int word = blockIdx.y * 32 + threadIdx.x % 32; word < pitch / 4; word += gridDim.y * 32) {
        u32 four = 0;
#pragma unroll
        for (int each = 0; each < 4; each++) {
            u32 last = mix(word * 4 + each + 0x9E3779B9u), byte = 0;
#pragma unroll
            for (int n = 0; n < 3; n++) {
                bool kept = true;
                if (threshold[n] != (int)0x80000000) kept = (int)mix(mix(a[n] ^ last) * (last | 1) + b[n]) >= threshold[n];
                byte |= (n == 0 ? kept : !kept) << n;
            }
            four |= byte << (8 * each);
        }
        bytes[word] = four;
    }
}
