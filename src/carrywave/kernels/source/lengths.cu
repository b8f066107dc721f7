// Handles lengths and resets around the recurrence, in one launch each: sorts the lanes, zeroes padded inputs, picks each lane's last h, and
// packs resets into bits.
//
// Compile-time constant, set by the host: FP16.

#include "half.cuh"

#define MOST 1024  // lanes that one block can sort

// order[B]: the lanes from longest to shortest, ties by lane number. left[chunks, B]: the real steps of each lane in each chunk.
extern "C" __global__ void deal(const long long* lengths, int count, int steps, int chunk_steps, int chunks, int* order, int* left) {
    __shared__ int length[MOST];
    int lane = threadIdx.x, own = 0;
    if (lane < count) {
        own = (int)max(0ll, min(lengths[lane], (long long)steps));
        length[lane] = own;
    }
    __syncthreads();
    if (lane >= count) return;
    int rank = 0;
    for (int other = 0; other < count; other++) rank += length[other] > own || (length[other] == own && other < lane);
    order[rank] = lane;
    for (int chunk = 0; chunk < chunks; chunk++) {
        int first = chunk * chunk_steps, span = min(chunk_steps, steps - first);
        left[chunk * count + lane] = max(0, min(own - first, span));
    }
}

// rows[T * B, pitch]: x[T, B, I] at real steps, and zeros elsewhere, whatever the padding holds. One warp per row.
extern "C" __global__ void real_rows(const u16* x, const long long* lengths, int count, int rows, int inputs, int pitch, u16* to) {
    for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += gridDim.x * blockDim.y) {
        bool real = row / count < lengths[row % count];
        const u16* from = x + (u64)row * inputs;
        if (inputs % 8 == 0) {
            for (int n = threadIdx.x; n < pitch / 8; n += 32)
                ((uint4*)(to + (u64)row * pitch))[n] = real ? ((const uint4*)from)[n] : make_uint4(0, 0, 0, 0);
        } else {
            for (int n = threadIdx.x; n < pitch; n += 32) to[(u64)row * pitch + n] = real && n < inputs ? from[n] : 0;
        }
    }
}

// last[B, H], float32 or half: each lane's h after its last real step, or its initial h if it has none.
extern "C" __global__ void last_state(const u16* hs, const long long* lengths, int count, int steps, int hidden, int padded, int halves, void* last) {
    int lane = blockIdx.y, unit = blockIdx.x * blockDim.x + threadIdx.x;
    if (unit >= hidden) return;
    u64 step = (u64)max(0ll, min(lengths[lane], (long long)steps));
    u16 value = hs[(step * count + lane) * padded + unit];
    if (halves) {
        ((u16*)last)[(u64)lane * hidden + unit] = value;
    } else {
        float low, high;
        unpack(value, low, high);
        ((float*)last)[(u64)lane * hidden + unit] = low;
    }
}

// bits[B, words], with bit n of a lane's words for step n: sets those of steps `first` to `first` + `steps` where a lane starts again, from
// resets[T, B]. A thread for each word of a lane that these steps touch; steps that are not among them keep their bits.
extern "C" __global__ void reset_bits(const unsigned char* resets, int count, int first, int steps, int words, u32* bits) {
    int lane = blockIdx.x * blockDim.x + threadIdx.x, word = first / 32 + blockIdx.y;
    if (lane >= count || word >= words) return;
    u32 set = 0;
#pragma unroll
    for (int n = 0; n < 32; n++) {
        int step = word * 32 + n - first;
        set |= (step >= 0 && step < steps ? resets[(u64)step * count + lane] != 0 : 0u) << n;
    }
    bits[(u64)lane * words + word] |= set;
}

// rows[T, B, H]: h before each step, or `begin`[H] (null: 0) where a lane starts again. One warp per row.
extern "C" __global__ void begun_rows(const u16* hs, const unsigned char* resets, const u16* begin, int rows, int width, u16* to) {
    for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += gridDim.x * blockDim.y) {
        bool again = resets[row];
        const uint4* from = (const uint4*)(again ? begin : hs + (u64)row * width);
        for (int n = threadIdx.x; n < width / 8; n += 32)
            ((uint4*)(to + (u64)row * width))[n] = from ? from[n] : make_uint4(0, 0, 0, 0);
    }
}
