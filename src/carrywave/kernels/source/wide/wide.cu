// One recurrent layer with many lanes over a whole sequence in one launch, forward and backward, for Hopper (sm_90a): 64 lanes in a pass,
// where persistent.cu has 32. What travels between blocks, and how, is the same; read that file first.
//
// The operands of the product change places. Weights are operand B, all of them in shared memory. The lanes' h (backward: gate gradients) is
// operand A, which wgmma takes from registers: a thread polls memory for just those numbers that its part of the product needs, and nothing
// is copied into shared memory. A block has two warpgroups, which share K between them, and each of its threads has all four sums of
// UNITS / 4 neighbouring units of one lane: it reads and writes whole vectors.
//
//   forward    sums[64 lanes, N = 4U] = h[64, K = H] W[4U rows, K]
//   backward   as in persistent.cu, a quad of blocks owns 4U units: each has a quarter of K = 4H for all of them, and they exchange the sums
//
// Any order of K will do if both operands have it. A thread's 16 bytes, 8 numbers of a row, are those that two instructions expect of it (4 each,
// in two places 8 apart), so the weights lie in that order (`load_weights`). The order of N is such that a thread's sums are those that it needs.
//
// Compile-time constants: FP16, KBLOCKS (H / 64), UNITS (U: 16), PASSES, SUM_BUFFERS (1 or 2), CLUSTER (4, the quads
// of backward; 0: forward only) and CELL. No heads, no resets, no noise.

#include "half.cuh"

#define LANES 64
#define THREADS 256
#define HIDDEN (KBLOCKS * 64)
#define BLOCKS_OF_GROUP (HIDDEN / UNITS)
#define ROWS (4 * UNITS)      // N
#define EACH (UNITS / 4)      // units of a thread
#define PIECES KBLOCKS        // of 32 numbers of K, for each warpgroup: one half of every 64
#define AT_ONCE (PIECES > 18 ? (PIECES + 1) / 2 : PIECES)  // loads in flight, as registers allow
#define STAGE ((AT_ONCE + 1) / 2)  // pieces that are multiplied as soon as they are there
#define OWNERS (UNITS * LANES)
#define B_BYTES (KBLOCKS * ROWS * 128)
#define HALF_BYTES (2 * UNITS * 128 * 4)  // the sums that the two warpgroups give each other
#define TABLE_BYTES (2 * LANES * PASSES * 4)
#define HALVES_AT B_BYTES
#define SLOTS_AT (HALVES_AT + SUM_BUFFERS * HALF_BYTES)
#define TABLE_AT (SLOTS_AT + PASSES * SLOT_BYTES)
#define RING_AT (TABLE_AT + TABLE_BYTES)
#define RING 2
#define RING_BYTES (RING * 4 * OWNERS * 4)
// Clock cycles, as measured on an H200. With several passes, the work of the other passes is pause enough.
#define FORWARD_PAUSE (PASSES > 1 ? 0 : 500)
#define BACKWARD_PAUSE (PASSES > 1 ? 0 : 300)

#include "cell.cuh"
#include "lanes.cuh"
#include "wide/owner.cuh"
#include "wide/product.cuh"

#define SETUP                                                                                                                        \
    extern __shared__ __align__(1024) unsigned char memory[];                                                                        \
    Lanes lanes = {order, lengths, count, groups, steps};                                                                            \
    u32 tiles = shared_address(memory);                                                                                              \
    int* places = (int*)(memory + TABLE_AT);                                                                                         \
    Table table = {places, places + LANES * PASSES};                                                                                 \
    int thread = threadIdx.x, row = (thread >> 5 & 3) * 16 + (thread >> 2 & 7), quarter = thread & 3;                                \
    int group = blockIdx.x / BLOCKS_OF_GROUP, member = blockIdx.x % BLOCKS_OF_GROUP, parity = 0;                                     \
    table.fill(lanes, group, thread);                                                                                                \
    int place = row + (thread >> 7) * 8, column = member * UNITS + quarter * EACH;                                                   \
    u64 step_h = (u64)lanes.count * HIDDEN;                                                                                          \
    Owner owner = {lanes, table, group, place, column, tiles + SLOTS_AT + thread * 16, step_h};

// A warpgroup's half of every 64 numbers of K, and a thread's 8 of these.
#define OPERAND (thread >> 7) * 32 + quarter * 8
#define SUMS (tiles + HALVES_AT + (SUM_BUFFERS == 2 ? parity : 0) * HALF_BYTES)

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const u16* __restrict__ weights, u16* hs, u16* gates, float* memories, const float* first_memory, float* last_memory, const int* order,
    const int* lengths, int count, int groups, int steps, int keep, const u32*, int, int, const float*, const unsigned char*, float, float, float) {
    SETUP
    load_weights(weights + (u64)member * ROWS * HIDDEN, HIDDEN, tiles, [](int n) {
        return ((n >> 1 & 3) * EACH + (n >> 4)) * 4 + (n >> 3 & 1) * 2 + (n & 1);  // the unit of the thread that has this column, its gate
    });
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    float c[PASSES][EACH];
    int active[PASSES];
    NoiseOf quiet = {1.0f, 0.0f, 0.0f};
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        bool there = owner.there(pass);
        u64 cell = owner.cell(pass);
#pragma unroll
        for (int n = 0; n < EACH; n++) c[pass][n] = there ? first_memory[cell + n] : 0.0f;
        active[pass] = table.active(pass, 0);
        owner.fetch(gates, 0, pass);
    }
    int longest = table.length[0];
    for (int step = 0; step < longest; step++) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            if (active[pass] == 0) {
                owner.slot(pass).close();
                continue;
            }
            u64 cell = (u64)step * step_h + owner.cell(pass);
            bool real = table.length[owner.at(pass)] > step;
            float sums[ROWS / 2], own[UNITS];
            u32 offset[2];
#pragma unroll
            for (int half = 0; half < 2; half++) offset[half] = (u32)table.lane[pass * LANES + row + 8 * half] * HIDDEN + OPERAND;
            multiply(sums, hs + step * step_h, offset, row, active[pass], step > 0, FORWARD_PAUSE, tiles);
            uint4 input[EACH / 2];
            owner.slot(pass).await();
#pragma unroll
            for (int n = 0; n < EACH / 2; n++) input[n] = load_smem(owner.slot(pass).address + PART(n));
            owner.fetch(gates, step + 1, pass);
            add_up(sums, own, SUMS);
            parity ^= 1;
            if (real) {
                float h[EACH];
                uint4 kept[EACH / 2];
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    float a[4];
                    unpack(n % 2 ? input[n / 2].z : input[n / 2].x, a[0], a[1]);
                    unpack(n % 2 ? input[n / 2].w : input[n / 2].y, a[2], a[3]);
#pragma unroll
                    for (int m = 0; m < 4; m++) a[m] += own[n * 4 + m];
                    h[n] = cell_forward(a, c[pass][n], 0.0f, quiet);
                    u32 low = pack(a[0], a[1]), high = pack(a[2], a[3]);
                    if (n % 2) kept[n / 2].z = low, kept[n / 2].w = high;
                    else kept[n / 2].x = low, kept[n / 2].y = high;
                }
                store_pair(hs + cell + step_h, pack(h[0], h[1]), pack(h[2], h[3]));
                if (keep) {
#pragma unroll
                    for (int n = 0; n < EACH / 2; n++) *(uint4*)(gates + cell * 4 + n * 8) = kept[n];
#pragma unroll
                    for (int n = 0; n < EACH; n += 4) *(float4*)(memories + cell + n) = make_float4(c[pass][n], c[pass][n + 1], c[pass][n + 2], c[pass][n + 3]);
                }
            }
            active[pass] = table.active(pass, step + 1);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        if (owner.there(pass)) {
            u64 cell = owner.cell(pass);
#pragma unroll
            for (int n = 0; n < EACH; n++) last_memory[cell + n] = c[pass][n];
            owner.pad(hs, pass);
        }
    }
}

#if CLUSTER
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1) backward(
    const u16* __restrict__ weights, const u16* gates, const float* memories, const float* first_memory, const u16* grad_y,
    const float* grad_last_h, const float* grad_last_memory, u16* grads, float* grad_first_h, float* grad_first_memory, float* grad_bias,
    u32*, const int* order, const int* lengths, int count, int groups, int steps, int after, int before, const u32*, int, int, const float*,
    float*, const unsigned char*, float, float, float) {
    SETUP
    int quad = member >> 2, part = member & 3;
    load_weights(weights + (u64)quad * ROWS * 4 * HIDDEN + part * HIDDEN, 4 * HIDDEN, tiles, [](int n) {
        return (n >> 3) / (EACH / 2) * UNITS + (n >> 1 & 3) * EACH + (n >> 3) % (EACH / 2) * 2 + (n & 1);  // the block of the quad, the unit in it
    });
    Swap swap = {tiles + RING_AT, part};
    swap.begin();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    cluster_barrier();

    float dc[PASSES][EACH], c_now[PASSES][EACH], bias[EACH][4];
    int active[PASSES];  // lanes that reach step + 1
    int longest = table.length[0], swaps = 0;
    NoiseOf quiet = {1.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < EACH; n++)
#pragma unroll
        for (int m = 0; m < 4; m++) bias[n][m] = 0.0f;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = owner.at(pass);
        bool there = owner.there(pass);
        u64 cell = owner.cell(pass);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            dc[pass][n] = there && grad_last_memory ? grad_last_memory[cell + n] : 0.0f;
            c_now[pass][n] = CELL != GRU && there && table.length[at] > 0 ? memories[(u64)(table.length[at] - 1) * step_h + cell + n] : 0.0f;
        }
        active[pass] = after && longest == lanes.steps ? table.active(pass, longest - 1) : 0;
        if (there) owner.pad_gates(grads, cell, pass);
        owner.fetch(gates, memories, first_memory, grad_y, longest - 1, pass);
    }
    // Step -1 computes the gradient of the initial h.
    for (int step = longest - 1; step >= (before ? 0 : -1); step--) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            int length = table.length[owner.at(pass)];
            u64 cell = owner.cell(pass);
            float recurrent[EACH], own[UNITS];
#pragma unroll
            for (int n = 0; n < EACH; n++) recurrent[n] = 0.0f;
            if (active[pass] > 0) {
                float sums[ROWS / 2];
                u32 offset[2];
#pragma unroll
                for (int half = 0; half < 2; half++) offset[half] = (u32)table.lane[pass * LANES + row + 8 * half] * 4 * HIDDEN + OPERAND;
                multiply(sums, grads + (u64)(step + 1) * step_h * 4 + part * HIDDEN, offset, row, active[pass], true, BACKWARD_PAUSE, tiles);
                add_up(sums, own, SUMS);
                parity ^= 1;
                swap.give(swaps, own);
            }
            // While the others' sums travel: everything that does not need them.
            u32 from = owner.slot(pass).address;
            uint4 kept[EACH / 2], last, given;
            owner.slot(pass).await();
#pragma unroll
            for (int n = 0; n < EACH / 2; n++) kept[n] = load_smem(from + PART(n));
            last = load_smem(from + PART(EACH / 2));
            given = load_smem(from + PART(EACH / 2 + 1));
            Slopes slopes[EACH];
            float c_before[EACH];
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                float a[4];
                unpack(n % 2 ? kept[n / 2].z : kept[n / 2].x, a[0], a[1]);
                unpack(n % 2 ? kept[n / 2].w : kept[n / 2].y, a[2], a[3]);
                c_before[n] = __uint_as_float(word_of(last, n));
                slopes[n] = Slopes(a, c_before[n], c_now[pass][n], quiet);
                slopes[n].hold();
            }
            if (active[pass] > 0) swap.sum(swaps++, own, recurrent);
            owner.fetch(gates, memories, first_memory, grad_y, step - 1, pass);
            // A lane that ended with the last step of this launch has no gradients behind it: they are zero there.
            bool follows = length > step + 1 || (length > step && step + 1 == lanes.steps && after);
            float dh[EACH];
#pragma unroll
            for (int n = 0; n < EACH; n++) dh[n] = chosen(follows, recurrent[n], 0.0f);
            if (step >= 0 && length > step) {
                u32 words[EACH * 2];
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    dh[n] += half_of(word_of(given, n / 2), n % 2);
                    if (step == length - 1 && grad_last_h) dh[n] += grad_last_h[cell + n];
                    cell_backward(slopes[n], dh[n], words + n * 2, dc[pass][n], bias[n]);
                    if (CELL != GRU) c_now[pass][n] = c_before[n];
                }
#pragma unroll
                for (int n = 0; n < EACH / 2; n++)
                    store_pieces(grads + ((u64)step * step_h + cell) * 4 + n * 8, make_uint4(words[n * 4], words[n * 4 + 1], words[n * 4 + 2], words[n * 4 + 3]));
            }
            if (step < 0 && length > 0) {
#pragma unroll
                for (int n = 0; n < EACH; n++) grad_first_h[cell + n] = dh[n];
            }
            active[pass] = step < 0 ? 0 : table.active(pass, step);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        u64 cell = owner.cell(pass);
        if (owner.there(pass)) {
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                grad_first_memory[cell + n] = dc[pass][n];
                owner.grad_first(grad_first_h, grad_last_h, cell + n, before, pass);
            }
        }
    }
    // The bias gradient: over the eight rows of a warp, then over the warps.
    float* sums = (float*)(memory + HALVES_AT);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < EACH; n++)
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
            for (int far = 4; far < 32; far *= 2) bias[n][m] += __shfl_xor_sync(0xFFFFFFFFu, bias[n][m], far);
            if ((thread & 31) < 4) sums[(thread >> 5) * ROWS + (quarter * EACH + n) * 4 + m] = bias[n][m];
        }
    __syncthreads();
    if (thread < ROWS) grad_bias[((u64)group * HIDDEN + member * UNITS) * 4 + thread] = summed(sums + thread, THREADS / 32, ROWS);
    cluster_barrier();
}
#endif
