// Before and after the recurrence: reorders weights for the kernels and their gradients back to torch's order, and fills buffers with the
// marker for "not yet written".
//
// Compile-time constants, set by the host: FP16, CELL (as in cell.cuh).

#include "half.cuh"

// The kernels have four rows for each unit. Those of an LSTM are its gates. A GRU's are its reset and update gate, the input's part of its
// candidate (which has no recurrent weights) and h's part (which has no input weights).
#if CELL == 1
#define GATES 3
__device__ __forceinline__ int slot_of(int gate, bool recurrent) { return gate == 2 && recurrent ? 3 : gate; }
__device__ __forceinline__ int gate_of(int slot, bool recurrent) { return slot < 2 ? slot : slot == (recurrent ? 3 : 2) ? 2 : -1; }
#else
#define GATES 4
__device__ __forceinline__ int slot_of(int gate, bool recurrent) { return gate; }
__device__ __forceinline__ int gate_of(int slot, bool recurrent) { return slot; }
#endif

__device__ __forceinline__ float number(const void* from, int halves, u64 at) {
    if (!halves) return ((const float*)from)[at];
    float low, high;
    unpack(((const u16*)from)[at], low, high);
    return low;
}

// Weights [GATES, H, I] (float32, or half if `halves`) -> [H padded, 4, pitch], both matrices in one launch; also the transposes
// [pitch, H padded, 4] if requested, of the recurrent one each head by itself; and the sum of the biases, [H padded, 4]. Everything beyond H and I is zero.
// A block of 32 x 8 threads handles 8 units (32 rows) and 32 columns.
extern "C" __global__ void pack_weights(
    const void* w_ih, const void* w_hh, const void* b_ih, const void* b_hh, int halves, int hidden, int inputs, u16* packed_ih, u16* packed_hh,
    u16* turned_hh, u16* bias, u16* turned_ih, int padded, int pitch_ih, int units_of_head, int padded_head) {
    __shared__ u16 tile[32][33];
    bool recurrent = blockIdx.z == 1;
    const void* from = recurrent ? w_hh : w_ih;
    u16* plain = recurrent ? packed_hh : packed_ih;
    int columns = recurrent ? units_of_head : inputs, pitch = recurrent ? padded_head : pitch_ih;
    int column = blockIdx.x * 32 + threadIdx.x, unit0 = blockIdx.y * 8;
    if (blockIdx.x * 32 >= pitch) return;
#pragma unroll
    for (int slot = 0; slot < 4; slot++) {
        int unit = unit0 + threadIdx.y, gate = gate_of(slot, recurrent);
        u16 value = 0;
        if (gate >= 0 && unit < hidden && column < columns) value = (u16)pack(number(from, halves, (u64)(gate * hidden + unit) * columns + column), 0.0f);
        if (column < pitch) plain[(u64)(unit * 4 + slot) * pitch + column] = value;
        tile[threadIdx.y * 4 + slot][threadIdx.x] = value;
    }
    if (!recurrent && blockIdx.x == 0 && threadIdx.y == 0) {
        int unit = unit0 + threadIdx.x / 4, of_input = gate_of(threadIdx.x & 3, false), of_h = gate_of(threadIdx.x & 3, true);
        float sum = 0.0f;
        if (b_ih && unit < hidden && of_input >= 0) sum += number(b_ih, halves, of_input * hidden + unit);
        if (b_ih && unit < hidden && of_h >= 0) sum += number(b_hh, halves, of_h * hidden + unit);
        bias[unit0 * 4 + threadIdx.x] = (u16)pack(sum, 0.0f);
    }
    u16* turned = recurrent ? turned_hh : turned_ih;
    if (!turned) return;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int row = blockIdx.x * 32 + threadIdx.y * 4 + n;
        u64 head = (u64)(unit0 / padded_head) * padded_head * padded_head * 4;
        turned[head + (u64)row * padded_head * 4 + unit0 % padded_head * 4 + threadIdx.x] = tile[threadIdx.x][threadIdx.y * 4 + n];
    }
}

// The inverse: gradients [H padded, 4, pitch] in half -> [GATES, H, I], float32 or half; and those of the biases, summed over the groups.
// A thread handles four columns of a row.
extern "C" __global__ void unpack_gradients(
    const u16* packed_ih, const u16* packed_hh, const float* bias, int groups, int halves, int hidden, int inputs, void* w_ih, void* w_hh, void* b,
    int padded, int pitch_ih, int units_of_head, int padded_head) {
    bool recurrent = blockIdx.z == 1;
    const u16* from = recurrent ? packed_hh : packed_ih;
    void* to = recurrent ? w_hh : w_ih;
    int columns = recurrent ? units_of_head : inputs, pitch = recurrent ? padded_head : pitch_ih;
    int column = (blockIdx.x * 32 + threadIdx.x) * 4, row = blockIdx.y * 8 + threadIdx.y;  // gate * H + unit
    if (row >= GATES * hidden) return;
    int gate = row / hidden, unit = row % hidden;
    if (!recurrent && column == 0) {
        for (int n = 0; n < 2; n++) {  // one for each of the two biases
            float sum = 0.0f;
            for (int each = 0; each < groups; each++) sum += bias[((u64)each * padded + unit) * 4 + slot_of(gate, n == 1)];
            if (halves) ((u16*)b)[n * GATES * hidden + row] = (u16)pack(sum, 0.0f);
            else ((float*)b)[n * GATES * hidden + row] = sum;
        }
    }
    if (column >= columns || !to) return;
    uint2 four = *(const uint2*)(from + (u64)(unit * 4 + slot_of(gate, recurrent)) * pitch + column);
    u64 at = (u64)row * columns + column;
    float value[4];
    unpack(four.x, value[0], value[1]);
    unpack(four.y, value[2], value[3]);
    if (columns % 4 == 0) {
        if (halves) *(uint2*)((u16*)to + at) = four;
        else *(float4*)((float*)to + at) = make_float4(value[0], value[1], value[2], value[3]);
    } else {
        for (int n = 0; n < 4 && column + n < columns; n++) {
            if (halves) ((u16*)to)[at + n] = (u16)pack(value[n], 0.0f);
            else ((float*)to)[at + n] = value[n];
        }
    }
}

// Fills `words` x 16 bytes with WORD_EMPTY. Forward: copies `h` ([count, H], float32 or half), zero-padded, to `first`, which precedes
// them. Backward: also zeroes `ring`, `zeros` x 16 bytes.
extern "C" __global__ void prepare(uint4* empty, int words, const void* h, int halves, int count, int hidden, int padded, u16* first, uint4* ring, int zeros) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 n = thread; n < words; n += threads) empty[n] = make_uint4(WORD_EMPTY, WORD_EMPTY, WORD_EMPTY, WORD_EMPTY);
    for (u64 n = thread; n < zeros; n += threads) ring[n] = make_uint4(0, 0, 0, 0);
    for (u64 n = thread; h && n < (u64)count * padded; n += threads) {
        int unit = n % padded;
        first[n] = unit < hidden ? (u16)pack(number(h, halves, n / padded * hidden + unit), 0.0f) : 0;
    }
}
