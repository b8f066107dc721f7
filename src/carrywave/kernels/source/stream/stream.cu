// One recurrent layer with many lanes over a whole sequence in one launch, forward and backward, for Hopper (sm_90a): where persistent.cu is bound
// by latency, this is bound by bandwidth. Who owns which units and lanes is the same there, and what travels between blocks; read that file first.
//
// With so many lanes, each step makes several passes of 64, and while the numbers of one travel, the block works on another. Blocks do not poll the
// data itself: a block writes it to global memory in the layout that the product reads, then publishes how far it has come (ring.cuh). A
// warp that does nothing else waits for that, and copies chunks of 64 numbers of K in bulk into a ring of stages in shared memory, for both
// blocks of a cluster at once: they need the same ones, and reading each once for two of them halves the traffic, which is what bounds a
// step. Two warpgroups multiply every second chunk each, with weights that stay in registers and in shared memory (product.cuh), add
// up their sums through shared memory, and compute the cells.
//
// Compile-time constants: FP16, KBLOCKS (H / 64, even), KREG (chunks of K per warpgroup whose weights are in registers), UNITS (16), LANES (64),
// PASSES, STAGES, CLUSTER (2) and CELL. No heads, no resets, no noise.

#include "half.cuh"

#define WARPGROUPS 2
#define THREADS (128 * WARPGROUPS)  // that compute; of one warpgroup more, a warp loads and a thread publishes
#define HIDDEN (KBLOCKS * 64)
#define BLOCKS_OF_GROUP (HIDDEN / UNITS)
#define KPW ((KBLOCKS + 1) / 2)
#define KSHARED (KPW - KREG)
#define OWNERS (UNITS * LANES)
#define EACH (OWNERS / THREADS)  // units of a thread, in one lane
#define SLICES (UNITS / EACH)    // threads of a lane
#define CHUNK_BYTES (LANES * 128)
#define PITCH 76  // of a lane's sums: no bank conflicts
#define WEIGHTS_AT (STAGES * CHUNK_BYTES)
#define SUMS_AT (WEIGHTS_AT + WARPGROUPS * KSHARED * 8192)
#define SLOTS_AT (SUMS_AT + WARPGROUPS * LANES * PITCH * 4)
#define TABLE_AT (SLOTS_AT + PASSES * SLOT_BYTES)
#define STAGED_AT (TABLE_AT + 2 * LANES * PASSES * 4)
#define STAGED_BYTES (OWNERS * 8)  // of a pass: what the block sends; in backward, four numbers of each unit
#define BARRIERS_AT (STAGED_AT + PASSES * STAGED_BYTES)

#include "cell.cuh"
#include "lanes.cuh"
#include "wide/owner.cuh"
#include "stream/ring.cuh"
#include "stream/product.cuh"

// Numbers of a thread's units, as words of two: written and read as one vector.
struct Words {
    u32 word[EACH / 2];
    __device__ __forceinline__ void write(void* to) const { *(uint2*)to = make_uint2(word[0], word[1]); }
    __device__ __forceinline__ void read(const void* from) {
        uint2 v = *(const uint2*)from;
        word[0] = v.x, word[1] = v.y;
    }
};
__device__ __forceinline__ void write_floats(float* to, const float (&v)[4]) { *(float4*)to = make_float4(v[0], v[1], v[2], v[3]); }
__device__ __forceinline__ void read_floats(float (&v)[4], const float* from) {
    float4 x = *(const float4*)from;
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
}

// The warpgroup that loads leaves its registers to the others.
#define FEW_REGISTERS asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#define MANY_REGISTERS asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");

// Which block of its group a block is: in forward all read the same chunks; in backward those of a cluster are the same part of neighbouring quads.
#define IN_ORDER(n) (n)
#define BY_PARTS(n) (((n) / (4 * CLUSTER) * CLUSTER + (n) % CLUSTER) * 4 + (n) / CLUSTER % 4)
// A block stays until no other of its cluster can write to it.
__device__ __forceinline__ void cluster_end() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

#define SETUP(CHUNKS, MEMBER)                                                                                                       \
    extern __shared__ __align__(1024) unsigned char memory[];                                                                       \
    Lanes lanes = {order, lengths, count, groups, steps};                                                                           \
    u32 tiles = shared_address(memory);                                                                                             \
    float* both = (float*)(memory + SUMS_AT);                                                                                       \
    int* places = (int*)(memory + TABLE_AT);                                                                                        \
    Table table = {places, places + LANES * PASSES};                                                                                \
    Ring ring = {tiles, tiles + BARRIERS_AT, (int)(blockIdx.x % CLUSTER)};                                                          \
    int thread = threadIdx.x, warpgroup = thread >> 7, row = (thread >> 5 & 3) * 16 + (thread >> 2 & 7), quarter = thread & 3;      \
    int group = blockIdx.x / BLOCKS_OF_GROUP, member = MEMBER(blockIdx.x % BLOCKS_OF_GROUP);                                        \
    /* A warp's threads of one lane lie together; lanes that are read at the same time are four apart, in other banks. */           \
    int slice = thread % SLICES, warp = thread >> 5;                                                                                \
    int place = warp * 8 + (thread >> 3 & 3) + (thread >> 2 & 1) * 4;                                                               \
    int column = member * UNITS + slice * EACH;                                                                                     \
    u32 staged = tiles + STAGED_AT, number = 0;                                                                                     \
    u64 step_h = (u64)lanes.count * HIDDEN;                                                                                         \
    Owner owner = {lanes, table, group, place, column, tiles + SLOTS_AT + thread * 16, step_h};                                     \
    Exchange<CHUNKS> exchange = {chunks, marks, groups, group};                                                                     \
    table.fill(lanes, group, thread);                                                                                               \
    ring.begin();                                                                                                                   \
    cluster_barrier();                                                                                                              \
    __syncthreads();                                                                                                                \
    Weights own;

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS + 128, 1) forward(
    const u16* __restrict__ weights, u16* hs, u16* gates, float* memories, const float* first_memory, float* last_memory, const int* order,
    const int* lengths, int count, int groups, int steps, int keep,
    u32* marks,               // [groups, PASSES, BLOCKS_OF_GROUP], zeroed
    unsigned char* chunks) {  // [2, groups, PASSES, KBLOCKS, CHUNK_BYTES]
    SETUP(KBLOCKS, IN_ORDER)
    int longest = table.length[0];
    if (thread >= THREADS) {
        FEW_REGISTERS
        if (warp == THREADS / 32) {
            for (int step = 0; step < longest; step++)
                for (int pass = 0; pass < PASSES; pass++) {
                    int active = table.active(pass, step);
                    if (active > 0) exchange.load(ring, number, step, pass, 0, step + 1);
                }
        } else if (thread == THREADS + 32) {
            u32 laps = 0;
            for (int step = 0; step < longest; step++)
                for (int pass = 0; pass < PASSES; pass++)
                    if (table.length[pass * LANES] > step) exchange.publish(ring, laps, staged, step, pass, member, step + 1);
        }
    } else {  // to the end: what the threads do that compute
    MANY_REGISTERS
    {
        auto from = [&](int m) {  // a row of the product: the unit of the thread that needs it, its gate
            int unit = (m >> 2) % SLICES * EACH + (m >> 2) / SLICES;
            return weights + (u64)((member * UNITS + unit) * 4 + (m & 3)) * HIDDEN;
        };
        own.load(from(row), from(row + 8), tiles + WEIGHTS_AT, warpgroup, row, quarter);
    }
    float c[PASSES][EACH];
    int active[PASSES];
    NoiseOf quiet = {1.0f, 0.0f, 0.0f};
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        bool there = owner.there(pass);
        u64 cell = owner.cell(pass);
#pragma unroll
        for (int n = 0; n < EACH; n++) c[pass][n] = 0.0f;
        if (there) {
            Words h;
            h.read(hs + cell);
            h.write((void*)__cvta_shared_to_generic(exchange.at(staged, pass, place, slice * EACH)));
            read_floats(c[pass], first_memory + cell);
        }
        active[pass] = table.active(pass, 0);
        if (active[pass] > 0) exchange.collected(ring, pass);
        owner.fetch(gates, 0, pass);
    }
    for (int step = 0; step < longest; step++) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            if (active[pass] == 0) {
                owner.slot(pass).close();
                continue;
            }
            int at = pass * LANES + place;
            u64 cell = (u64)step * step_h + owner.cell(pass);
            bool real = table.length[at] > step;
            {
                float sums[LANES / 2];
                own.multiply(sums, ring, number, warpgroup);
                number += KBLOCKS;
                put(sums, both, warpgroup, row, quarter);
            }
            owner.slot(pass).await();
            Words h;
            uint2 kept[EACH];
            float h_of[EACH];
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                float a[4], sums[4];
                uint2 input = *(const uint2*)__cvta_shared_to_generic(owner.slot(pass).address + PART(n / 2) + n % 2 * 8);
                unpack(input.x, a[0], a[1]);
                unpack(input.y, a[2], a[3]);
                take(sums, both, place, (n * SLICES + slice) * 4);
#pragma unroll
                for (int m = 0; m < 4; m++) a[m] += sums[m];
                if (real) h_of[n] = cell_forward(a, c[pass][n], 0.0f, quiet);
                kept[n] = make_uint2(pack(a[0], a[1]), pack(a[2], a[3]));
            }
#pragma unroll
            for (int n = 0; n < EACH / 2; n++) h.word[n] = pack(h_of[2 * n], h_of[2 * n + 1]);
            if (real) h.write((void*)__cvta_shared_to_generic(exchange.at(staged, pass, place, slice * EACH)));
            active[pass] = table.active(pass, step + 1);
            if (active[pass] > 0) exchange.collected(ring, pass);
            owner.fetch(gates, step + 1, pass);
            if (real) {
                h.write(hs + cell + step_h);
                if (keep) {
#pragma unroll
                    for (int n = 0; n < EACH; n += 2) *(uint4*)(gates + cell * 4 + n * 4) = make_uint4(kept[n].x, kept[n].y, kept[n + 1].x, kept[n + 1].y);
                    write_floats(memories + cell, c[pass]);
                }
            }
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        if (owner.there(pass)) {
            write_floats(last_memory + owner.cell(pass), c[pass]);
            owner.pad(hs, pass);
        }
    }
}
    cluster_end();
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS + 128, 1) backward(
    const u16* __restrict__ weights, const u16* gates, const float* memories, const float* first_memory, const u16* grad_y,
    const float* grad_last_h, const float* grad_last_memory, u16* grads, float* grad_first_h, float* grad_first_memory, float* grad_bias,
    const int* order, const int* lengths, int count, int groups, int steps, int after, int before,
    u32* marks,               // [groups, PASSES, BLOCKS_OF_GROUP], then the words of the quads' exchange; zeroed
    unsigned char* chunks) {  // [2, groups, PASSES, 4 * KBLOCKS, CHUNK_BYTES]
    SETUP(4 * KBLOCKS, BY_PARTS)
    int quad = member >> 2, part = member & 3;
    int longest = table.length[0];
    bool goes_on = after && longest == lanes.steps;
    // Step -1 computes the gradient of the initial h.
    int last = before ? 0 : -1;
    if (thread >= THREADS) {
        FEW_REGISTERS
        if (warp == THREADS / 32) {
            for (int step = longest - 1; step >= last; step--)
                for (int pass = 0; pass < PASSES; pass++) {
                    int active = step < longest - 1 ? table.active(pass, step + 1) : goes_on ? table.active(pass, step) : 0;
                    if (active > 0) exchange.load(ring, number, step + 1, pass, part * KBLOCKS, longest - step);
                }
        } else if (thread == THREADS + 32) {
            u32 laps = 0;
            for (int step = goes_on ? longest : longest - 1; step >= 0; step--)
                for (int pass = 0; pass < PASSES; pass++)
                    if (table.length[pass * LANES] > min(step, longest - 1)) exchange.publish(ring, laps, staged, step, pass, member, longest - step + 1);
        }
    } else {  // to the end: what the threads do that compute
    MANY_REGISTERS
    {
        const u16* from = weights + (u64)(quad * 64 + row) * 4 * HIDDEN + part * HIDDEN;
        own.load(from, from + (u64)8 * 4 * HIDDEN, tiles + WEIGHTS_AT, warpgroup, row, quarter);
    }
    Swap swap = {marks + groups * PASSES * BLOCKS_OF_GROUP, group * BLOCKS_OF_GROUP + quad * 4, part};
    float dc[PASSES][EACH], c_now[PASSES][EACH], bias[EACH][4];
    int active[PASSES];  // lanes that reach step + 1
    int swaps = 0;
    NoiseOf quiet = {1.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < EACH; n++)
#pragma unroll
        for (int m = 0; m < 4; m++) bias[n][m] = 0.0f;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = pass * LANES + place;
        bool there = owner.there(pass);
        u64 cell = owner.cell(pass);
#pragma unroll
        for (int n = 0; n < EACH; n++) dc[pass][n] = c_now[pass][n] = 0.0f;
        if (there && grad_last_memory) read_floats(dc[pass], grad_last_memory + cell);
        if (CELL != GRU && there && table.length[at] > 0) read_floats(c_now[pass], memories + (u64)(table.length[at] - 1) * step_h + cell);
        active[pass] = goes_on ? table.active(pass, longest - 1) : 0;
        if (active[pass] > 0) {
            if (table.length[at] == longest) {
#pragma unroll
                for (int n = 0; n < EACH / 2; n++)
                    store_smem(exchange.at(staged, pass, place, (slice * EACH + n * 2) * 4), *(const uint4*)(grads + ((u64)longest * step_h + cell) * 4 + n * 8));
            }
            exchange.collected(ring, pass);
        }
        if (there) owner.pad_gates(grads, cell, pass);
        owner.fetch(gates, memories, first_memory, grad_y, longest - 1, pass);
    }
    for (int step = longest - 1; step >= last; step--) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            int length = table.length[owner.at(pass)];
            u64 cell = owner.cell(pass);
            float recurrent[EACH];
            auto of = [&](float(&sums)[EACH], int to) { take(sums, both, place, to * UNITS + slice * EACH); };  // each block of the quad gets what it owns
#pragma unroll
            for (int n = 0; n < EACH; n++) recurrent[n] = 0.0f;
            if (active[pass] > 0) {
                float sums[LANES / 2];
                own.multiply(sums, ring, number, warpgroup);
                number += KBLOCKS;
                put(sums, both, warpgroup, row, quarter);
                swap.give(swaps, of);
            }
            // While the others' sums travel: everything that does not need them.
            owner.slot(pass).await();
            const unsigned char* from = (const unsigned char*)__cvta_shared_to_generic(owner.slot(pass).address);
            Slopes slopes[EACH];
            float c_before[EACH];
            Words y;
            read_floats(c_before, (const float*)(from + PART(EACH / 2)));
            y.read(from + PART(EACH / 2 + 1));
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                float a[4];
                uint2 kept = *(const uint2*)(from + PART(n / 2) + n % 2 * 8);
                unpack(kept.x, a[0], a[1]);
                unpack(kept.y, a[2], a[3]);
                slopes[n] = Slopes(a, c_before[n], c_now[pass][n], quiet);
                slopes[n].hold();
            }
            if (active[pass] > 0) swap.sum(swaps++, recurrent, of);
            owner.fetch(gates, memories, first_memory, grad_y, step - 1, pass);
            // A lane that ended with the last step of this launch has no gradients behind it: they are zero there.
            bool follows = length > step + 1 || (length > step && step + 1 == lanes.steps && after), real = step >= 0 && length > step;
            float dh[EACH];
            u32 words[EACH * 2];
#pragma unroll
            for (int n = 0; n < EACH; n++) dh[n] = chosen(follows, recurrent[n], 0.0f);
            if (real) {
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    dh[n] += half_of(y.word[n / 2], n % 2);
                    if (step == length - 1 && grad_last_h) dh[n] += grad_last_h[cell + n];
                    cell_backward(slopes[n], dh[n], words + n * 2, dc[pass][n], bias[n]);
                    if (CELL != GRU) c_now[pass][n] = c_before[n];
                }
#pragma unroll
                for (int n = 0; n < EACH / 2; n++)
                    store_smem(exchange.at(staged, pass, place, (slice * EACH + n * 2) * 4), make_uint4(words[n * 4], words[n * 4 + 1], words[n * 4 + 2], words[n * 4 + 3]));
            }
            int next = step < 0 ? 0 : table.active(pass, step);
            if (next > 0) exchange.collected(ring, pass);
            if (real) {
#pragma unroll
                for (int n = 0; n < EACH / 2; n++)
                    *(uint4*)(grads + ((u64)step * step_h + cell) * 4 + n * 8) = make_uint4(words[n * 4], words[n * 4 + 1], words[n * 4 + 2], words[n * 4 + 3]);
            }
            if (step < 0 && length > 0) write_floats(grad_first_h + cell, dh);
            active[pass] = next;
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        u64 cell = owner.cell(pass);
        if (owner.there(pass)) {
            write_floats(grad_first_memory + cell, dc[pass]);
#pragma unroll
            for (int n = 0; n < EACH; n++) owner.grad_first(grad_first_h, grad_last_h, cell + n, before, pass);
        }
    }
    // The bias gradient, over all lanes in order, once everyone has read the last sums.
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#pragma unroll
    for (int n = 0; n < EACH; n++)
#pragma unroll
        for (int m = 0; m < 4; m++) both[((slice * EACH + n) * 4 + m) * (LANES + 1) + place] = bias[n][m];
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    if (thread < 4 * UNITS) grad_bias[((u64)group * HIDDEN + member * UNITS) * 4 + thread] = summed(both + thread * (LANES + 1), LANES, 1);
}
    cluster_end();
}
