// One LSTM layer over a whole sequence in one launch, forward and backward, for Hopper (sm_90a).
//
// A recurrent step is bound by latency, so the weights never move: each block keeps its 64 rows of the recurrent matrix in
// registers (and, for wide layers, in shared memory) for the whole sequence, and only h (backward: the gates' gradients) travels
// between blocks, through L2. There are no flags and no barriers between blocks: the data say themselves that they are there.
// The buffer is filled with a NaN that no conversion ever produces (all bits set) before the launch, every 32-bit word of it is
// written once, and a reader polls each word it needs until it is something else. A word is read and judged by itself, so no
// order between words is needed.
//
// Lanes are dealt to groups of blocks that know nothing of each other. Within a group every block owns U units (16 or 32):
//   forward    gates[4U, N] = W[4U rows = U units x 4 gates, K = H] h[K, N]
//   backward   the four blocks of a quad own 4U units together. Each takes a quarter of K = 4H for all of them, and they swap
//              the partial sums (float32, the lowest bit saying of which lap through a small ring a word is).
// Either way a block multiplies [4U, H] with [H, N]: its warpgroups share K, by wgmma with the weights as operand A and the other
// in shared memory (128-byte swizzle), partial sums through shared memory, one thread for each unit and lane.
//
// Layouts: gates are interleaved, (unit, gate) with the gate fastest; H is padded to a multiple of 64 with zero weights. Steps lie
// one after the other: h[T + 1, B, H] with the initial one first, gates[T, B, H, 4], cells[T, B, H] in float32.
//
// Compile-time constants, given by the host: FP16, KBLOCKS (H / 64), KREG (64-wide blocks of K for each warpgroup that stay in
// registers), UNITS (U), LANES (N, of one pass: 8, 16, 24 or 32, at most 512 / U), PASSES (of so many lanes; a group has
// LANES * PASSES), SUM_BUFFERS (1 or 2).

#define WARPGROUPS 4
#define WORD_EMPTY 0xFFFFFFFFu
#define THREADS (128 * WARPGROUPS)
#define HIDDEN (KBLOCKS * 64)
#define BLOCKS_OF_GROUP (HIDDEN / UNITS)
#define TILES (UNITS / 16)                // of 64 rows
#define KPW ((KBLOCKS + WARPGROUPS - 1) / WARPGROUPS)  // 64-wide blocks of K for each warpgroup
#define KSHARED (KPW - KREG)             // of which these lie in shared memory
#define CHUNKS (KPW * 8 * LANES)         // 16-byte pieces that a warpgroup gathers in a pass
#define PIECES ((CHUNKS + 127) / 128)    // of one thread
#define ROW_PITCH (LANES + 4)            // of the partial sums: no bank conflicts
#define RED_FLOATS (64 * TILES * ROW_PITCH)
#define B_BYTES (WARPGROUPS * KPW * LANES * 128)
#define A_BYTES (WARPGROUPS * KSHARED * TILES * 8192)
#define RED_BYTES (SUM_BUFFERS * WARPGROUPS * RED_FLOATS * 4)
#define SLOT_BYTES (PASSES * THREADS * 16)
#define RING 4
// As measured on an H200. With several passes the others' work is pause enough.
#define FORWARD_PAUSE (PASSES > 1 ? 0 : LANES > 8 ? 500 : 300)
#define BACKWARD_PAUSE (PASSES > 1 || KBLOCKS < 8 ? 0 : 300)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct Lanes {
    const int* order;    // lanes from the longest to the shortest, or null: as they come
    const int* lengths;  // of each lane, or null: all are full
    int count;           // lanes
    int groups;
    int steps;
};

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
#if FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
#if FP16
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(word));
#else
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
#endif
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Both saturate rightly: 2^x becomes infinite or 0. Their absolute error of 1e-7 is far below that of h.
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + power_of_2(-1.442695041f * x)); }
__device__ __forceinline__ float tanh_(float x) { return 1.0f - 2.0f * reciprocal(1.0f + power_of_2(2.885390082f * x)); }

__device__ __forceinline__ uint4 load_pieces(const void* address) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_word(const void* address) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}
__device__ __forceinline__ void store_word(void* address, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory"); }
__device__ __forceinline__ void store_pair(void* address, u32 a, u32 b) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_smem(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// --- the product ---------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u64 descriptor(u32 address) {  // K-major, 128-byte swizzle, 8 rows every 1024 bytes
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#if FP16
#define MMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 "
#else
#define MMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 "
#endif
#if LANES == 8
#define D_LIST "{%0, %1, %2, %3}"
#define D_OPS(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define MMA_N MMA(8)
#define R0 "%4"
#define R1 "%5"
#define R2 "%6"
#define R3 "%7"
#define R4 "%8"
#elif LANES == 16
#define D_LIST "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define D_OPS(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MMA_N MMA(16)
#define R0 "%8"
#define R1 "%9"
#define R2 "%10"
#define R3 "%11"
#define R4 "%12"
#elif LANES == 24
#define D_LIST "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}"
#define D_OPS(d)                                                                                                                    \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define MMA_N MMA(24)
#define R0 "%12"
#define R1 "%13"
#define R2 "%14"
#define R3 "%15"
#define R4 "%16"
#elif LANES == 32
#define D_LIST "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define D_OPS(d)                                                                                                                    \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define MMA_N MMA(32)
#define R0 "%16"
#define R1 "%17"
#define R2 "%18"
#define R3 "%19"
#define R4 "%20"
#endif

__device__ __forceinline__ void mma_registers(float (&d)[LANES / 2], const u32 (&a)[4], u64 b) {
    asm volatile(MMA_N D_LIST ", {" R0 ", " R1 ", " R2 ", " R3 "}, " R4 ", 1, 1, 1, 0;\n" : D_OPS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void mma_shared(float (&d)[LANES / 2], u64 a, u64 b) {
    asm volatile(MMA_N D_LIST ", " R0 ", " R1 ", 1, 1, 1, 0, 0;\n" : D_OPS(d) : "l"(a), "l"(b));
}

// The weights of a block: tiles of 64 rows, of which a thread holds two in the layout of wgmma's operand A.
struct Weights {
    u32 fragment[KREG > 0 ? KREG : 1][TILES][4][4];
    u32 shared;  // those of this warpgroup that do not fit

    // `row0`: this thread's first row of the first tile, from the first column of this block's K; the second is `to_second` further
    // on, the next tile `to_next`.
    __device__ __forceinline__ void load(const u16* row0, u64 to_second, u64 to_next, u32 tiles, int warpgroup, int warp, int lane) {
        int q = lane & 3, row = warp * 16 + (lane >> 2);
        shared = tiles + warpgroup * KSHARED * TILES * 8192;
#pragma unroll
        for (int i = 0; i < KPW; i++) {
            int block = warpgroup + WARPGROUPS * i;
#pragma unroll
            for (int m = 0; m < TILES; m++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 part[4];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int k = j * 16 + half * 8 + q * 2;
                        const u16* from = row0 + m * to_next + block * 64 + k;
                        bool there = block < KBLOCKS;
                        part[half * 2] = there ? *(const u32*)from : 0;
                        part[half * 2 + 1] = there ? *(const u32*)(from + to_second) : 0;
                        if (i >= KREG) {
                            u32 tile = shared + ((i - KREG) * TILES + m) * 8192 + ((((k >> 3) ^ (row & 7)) << 4) | ((k & 7) * 2));
                            asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + row * 128), "r"(part[half * 2]) : "memory");
                            asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + (row + 8) * 128), "r"(part[half * 2 + 1]) : "memory");
                        }
                    }
                    if (i < KREG) {
#pragma unroll
                        for (int n = 0; n < 4; n++) fragment[i < KREG ? i : 0][m][j][n] = part[n];
                    }
                }
            }
        }
    }

    // sums[64 * TILES, LANES] of this warpgroup's part of K, into `out`.
    __device__ __forceinline__ void multiply(u32 tiles, float* out, int warpgroup, int warp, int lane) const {
        float sums[TILES][LANES / 2];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < LANES / 2; n++) sums[m][n] = 0.0f;
        u64 b = descriptor(tiles + warpgroup * KPW * LANES * 128);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < KPW; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u64 from = b + ((i * LANES * 128 + j * 32) >> 4);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    if (i < KREG) mma_registers(sums[m], fragment[i < KREG ? i : 0][m][j], from);
                    else mma_shared(sums[m], descriptor(shared + ((i - KREG) * TILES + m) * 8192) + ((j * 32) >> 4), from);
                }
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        // No compiler may read them before the wait.
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < LANES / 2; n++) asm volatile("" : "+f"(sums[m][n])::"memory");
        float* row = out + warpgroup * RED_FLOATS + (warp * 16 + (lane >> 2)) * ROW_PITCH + (lane & 3) * 2;
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int n = 0; n < LANES / 8; n++) {
                *(float2*)(row + m * 64 * ROW_PITCH + n * 8) = make_float2(sums[m][n * 4], sums[m][n * 4 + 1]);
                *(float2*)(row + (m * 64 + 8) * ROW_PITCH + n * 8) = make_float2(sums[m][n * 4 + 2], sums[m][n * 4 + 3]);
            }
        }
    }
};

// --- what comes from other blocks --------------------------------------------------------------------------------------------------

// Bounded: a wait of seconds means that a block is missing, and ends the launch in an error.
struct Patience {
    int left;
    __device__ __forceinline__ void spend() {
        if (--left < 0) asm volatile("trap;");
    }
};
#define PATIENCE 20000000

// Brings this warpgroup's part of K, of the lanes of a pass, from memory into shared memory, in pieces of 16 bytes.
//
// Piece n of a thread belongs to the row and block of K of number n * 128 + thread, counted block by block. Rows repeat after PERIOD
// pieces, SKIP blocks further on, so that few addresses are needed.
#if LANES == 8
#define PERIOD 1
#define SKIP 2
#elif LANES == 24
#define PERIOD 3
#define SKIP 2
#else
#define PERIOD (LANES / 16)
#define SKIP 1
#endif

struct Gather {
    u32 offset[PERIOD], target[PERIOD];
    int row[PERIOD];
    u32 there;  // the pieces that exist

    __device__ __forceinline__ void prepare(const int* lane_of, int pitch, u32 tiles, int warpgroup, int thread) {
        there = 0;
#pragma unroll
        for (int n = 0; n < PERIOD; n++) {
            int id = n * 128 + thread, i = id / (8 * LANES);
            row[n] = (id % (8 * LANES)) / 8;
            offset[n] = (u32)lane_of[row[n]] * pitch + (warpgroup + WARPGROUPS * i) * 64 + (id & 7) * 8;
            target[n] = tiles + (warpgroup * KPW + i) * LANES * 128 + row[n] * 128 + (((id & 7) ^ (row[n] & 7)) << 4);
        }
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            int id = n * 128 + thread;
            there |= id < CHUNKS && warpgroup + WARPGROUPS * (id / (8 * LANES)) < KBLOCKS ? 1u << n : 0;
        }
    }

    // `published`: whether other blocks write it in this launch, so that it may not be there yet.
    // `pause`: clocks to wait before the first look. Polls that come too soon only keep the memory from what they wait for.
    __device__ __forceinline__ void run(const u16* from, int active, bool published, int pause, int warpgroup) const {
        uint4 piece[PIECES];
        u32 missing = there;
        if (active < LANES) {
#pragma unroll
            for (int n = 0; n < PIECES; n++) missing &= row[n % PERIOD] < active ? ~0u : ~(1u << n);
        }
        if (pause > 0 && published) {
            u32 now = clock();
            while ((u32)clock() - now < pause) continue;
        }
        int tries = 0;
        while (__any_sync(0xFFFFFFFFu, missing)) {
#pragma unroll
            for (int n = 0; n < PIECES; n++)
                if (missing >> n & 1) piece[n] = load_pieces(from + offset[n % PERIOD] + (n / PERIOD) * SKIP * WARPGROUPS * 64);
#pragma unroll
            for (int n = 0; n < PIECES; n++) {
                bool whole = piece[n].x != WORD_EMPTY && piece[n].y != WORD_EMPTY && piece[n].z != WORD_EMPTY && piece[n].w != WORD_EMPTY;
                if ((missing >> n & 1) && (whole || !published)) {
                    store_smem(target[n % PERIOD] + (n / PERIOD) * SKIP * LANES * 128, piece[n]);
                    missing &= ~(1u << n);
                }
            }
            if (++tries > PATIENCE) asm volatile("trap;");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
    }
};

// The lanes of a group, longest first; [LANES * PASSES] each.
struct Table {
    int* lane;
    int* length;  // 0: no lane here

    __device__ __forceinline__ void fill(const Lanes& lanes, int group, int thread) {
        for (int place = thread; place < LANES * PASSES; place += THREADS) {
            // Dealt out like cards, so that every group has long and short ones.
            int rank = place * lanes.groups + group;
            bool there = rank < lanes.count;
            int number = there ? (lanes.order ? lanes.order[rank] : rank) : 0;
            lane[place] = number;
            length[place] = there ? (lanes.lengths ? min(lanes.lengths[number], lanes.steps) : lanes.steps) : 0;
        }
    }
    // How many lanes of a pass reach a step: they are sorted, so these are the first.
    __device__ __forceinline__ int active(int pass, int step) const {
        int place = threadIdx.x & 31;
        return __popc(__ballot_sync(0xFFFFFFFFu, place < LANES && length[pass * LANES + place] > step));
    }
};

// What a step reads of memory is asked for a step ahead, into a place of the thread's own, and after its polling: the loads of a
// multiprocessor come back in the order in which they were made, and those that poll would wait for the slower ones.
struct Slot {
    u32 address;
    __device__ __forceinline__ void fetch_8(int at, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address + at), "l"(from) : "memory"); }
    __device__ __forceinline__ void fetch_4(int at, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address + at), "l"(from) : "memory"); }
    __device__ __forceinline__ void close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    // Every pass closes one group a step, so that those of the other passes may still be under way.
    __device__ __forceinline__ uint4 read() {
        uint4 v;
        asm volatile("cp.async.wait_group %0;" ::"n"(PASSES - 1) : "memory");
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
        return v;
    }
};

#define SETUP                                                                                                                       \
    extern __shared__ __align__(1024) unsigned char memory[];                                                                       \
    Lanes lanes = {order, lengths, count, groups, steps};                                                                           \
    u32 tiles = shared_address(memory);                                                                                             \
    float* partial = (float*)(memory + B_BYTES + A_BYTES);                                                                          \
    Slot slot = {tiles + B_BYTES + A_BYTES + RED_BYTES + threadIdx.x * 16};                                                         \
    int* places = (int*)(memory + B_BYTES + A_BYTES + RED_BYTES + SLOT_BYTES);                                                      \
    Table table = {places, places + LANES * PASSES};                                                                                \
    int thread = threadIdx.x, warpgroup = thread >> 7, warp = (thread >> 5) & 3, lane = thread & 31;                                \
    int group = blockIdx.x / BLOCKS_OF_GROUP, member = blockIdx.x % BLOCKS_OF_GROUP;                                                \
    for (int n = thread * 16; n < B_BYTES; n += THREADS * 16) *(uint4*)(memory + n) = make_uint4(0, 0, 0, 0);                       \
    table.fill(lanes, group, thread);                                                                                               \
    /* One thread for each unit and lane: eight units of four lanes in a warp. */                                                   \
    int unit = (thread & 7) + (thread / (8 * LANES)) * 8, place = (thread >> 3) % LANES;                                            \
    bool owner = thread < UNITS * LANES;                                                                                               \
    int column = member * UNITS + unit, parity = 0;                                                                                    \
    u64 step_h = (u64)lanes.count * HIDDEN;                                                                                         \
    Gather gather;                                                                                                                  \
    Weights own;

// The partial sums of all warpgroups are there; with one buffer, `done` says that it may be written again.
#define SUMS (partial + (SUM_BUFFERS == 2 ? parity : 0) * WARPGROUPS * RED_FLOATS)
__device__ __forceinline__ void done() {
    if (SUM_BUFFERS == 1) __syncthreads();
}

// The sum of the warpgroups' partial sums for one row and lane, always in the same order.
__device__ __forceinline__ float total(const float* partial, int row, int place) {
    const float* at = partial + row * ROW_PITCH + place;
    float sum = at[0];
#pragma unroll
    for (int n = 1; n < WARPGROUPS; n++) sum += at[n * RED_FLOATS];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) lstm_forward(
    const u16* __restrict__ weights,  // [4H interleaved, H]
    u16* hs,                          // [T + 1, B, H]: the first is given, the others hold WORD_EMPTY
    u16* gates,                       // [T, B, H, 4]: the input's product; replaced by the gates
    float* cells,                     // [T, B, H]
    const float* first_c,             // [B, H]
    u16* last_h,                      // [B, H]
    float* last_c,                    // [B, H]
    const int* order, const int* lengths, int count, int groups, int steps, int keep) {
    SETUP
    {
        // A tile has 16 units, and a warp one gate of them.
        const u16* row0 = weights + (u64)((member * UNITS + (lane >> 2)) * 4 + warp) * HIDDEN;
        own.load(row0, (u64)8 * 4 * HIDDEN, (u64)16 * 4 * HIDDEN, tiles + B_BYTES, warpgroup, warp, lane);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    float c[PASSES];
    u16 h_end[PASSES];
    int active[PASSES];
    auto fetch = [&](int step, int pass) {
        int at = pass * LANES + place;
        Slot to = {slot.address + pass * THREADS * 16};
        if (owner && table.length[at] > step) to.fetch_8(0, gates + (step * step_h + (u64)table.lane[at] * HIDDEN + column) * 4);
        to.close();
    };
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = pass * LANES + place;
        bool there = owner && group + at * lanes.groups < lanes.count;
        u64 cell = (u64)table.lane[at] * HIDDEN + column;
        c[pass] = there ? first_c[cell] : 0.0f;
        h_end[pass] = there && table.length[at] == 0 ? hs[cell] : 0;
        active[pass] = table.active(pass, 0);
        fetch(0, pass);
    }
    if (PASSES == 1) gather.prepare(table.lane, HIDDEN, tiles, warpgroup, thread & 127);
    int longest = table.length[0];
    for (int step = 0; step < longest; step++) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            if (active[pass] == 0) {
                slot.close();
                continue;
            }
            int at = pass * LANES + place;
            u64 cell = (u64)step * step_h + (u64)table.lane[at] * HIDDEN + column;
            bool real = owner && table.length[at] > step;
            if (PASSES > 1) gather.prepare(table.lane + pass * LANES, HIDDEN, tiles, warpgroup, thread & 127);
            gather.run(hs + step * step_h, active[pass], step > 0, FORWARD_PAUSE, warpgroup);
            uint4 input = Slot{slot.address + pass * THREADS * 16}.read();
            fetch(step + 1, pass);
            own.multiply(tiles, SUMS, warpgroup, warp, lane);
            __syncthreads();
            float a_i = 0.0f, a_f = 0.0f, a_g = 0.0f, a_o = 0.0f;
            if (owner) {
                unpack(input.x, a_i, a_f);
                unpack(input.y, a_g, a_o);
                int row = unit / 16 * 64 + unit % 16;
                a_i += total(SUMS, row, place), a_f += total(SUMS, row + 16, place);
                a_g += total(SUMS, row + 32, place), a_o += total(SUMS, row + 48, place);
            }
            done();
            parity ^= 1;
            if (owner) {
                float i = sigmoid(a_i), f = sigmoid(a_f), g = tanh_(a_g), o = sigmoid(a_o), h = 0.0f;
                if (real) {
                    c[pass] = f * c[pass] + i * g;
                    h = o * tanh_(c[pass]);
                }
                float beside = __shfl_xor_sync(0xFFFFFFFFu, h, 1);
                u32 both = (unit & 1) ? pack(beside, h) : pack(h, beside);
                if (real) {
                    if (!(unit & 1)) store_word(hs + cell + step_h, both);
                    if (keep) {
                        *(uint2*)(gates + cell * 4) = make_uint2(pack(i, f), pack(g, o));
                        cells[cell] = c[pass];
                    }
                    h_end[pass] = (unit & 1) ? (u16)(both >> 16) : (u16)both;
                }
            }
            active[pass] = table.active(pass, step + 1);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = pass * LANES + place;
        if (owner && group + at * lanes.groups < lanes.count) {
            u64 cell = (u64)table.lane[at] * HIDDEN + column;
            last_h[cell] = h_end[pass];
            last_c[cell] = c[pass];
            // No block waits for these: a lane that has ended is not gathered.
            for (int step = table.length[at]; step < lanes.steps; step++) hs[(u64)(step + 1) * step_h + cell] = 0;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) lstm_backward(
    const u16* __restrict__ weights,  // [H, 4H interleaved]: the recurrent matrix, transposed
    const u16* gates,                 // [T, B, H, 4]
    const float* cells,               // [T, B, H]
    const float* first_c,             // [B, H]
    const u16* grad_y,                // [T, B, H]
    const float* grad_last_h,         // [B, H] or null
    const float* grad_last_c,         // [B, H] or null
    u16* grads,                       // [T, B, H, 4], hold WORD_EMPTY: the gradients before the activations
    float* grad_first_h,              // [B, H]
    float* grad_first_c,              // [B, H]
    float* grad_bias,                 // [groups, H, 4]
    u32* ring,                        // [RING, blocks, 4, UNITS * LANES], zero
    const int* order, const int* lengths, int count, int groups, int steps) {
    SETUP
    int quad = member >> 2, part = member & 3;
    {
        const u16* row0 = weights + (u64)(quad * 4 * UNITS + warp * 16 + (lane >> 2)) * 4 * HIDDEN + part * HIDDEN;
        own.load(row0, (u64)8 * 4 * HIDDEN, (u64)64 * 4 * HIDDEN, tiles + B_BYTES, warpgroup, warp, lane);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    float dc[PASSES], c_now[PASSES], bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int active[PASSES];  // at the step after
    int longest = table.length[0], swaps = 0;
    auto fetch = [&](int step, int pass) {
        int at = pass * LANES + place;
        Slot to = {slot.address + pass * THREADS * 16};
        if (owner && step >= 0 && table.length[at] > step) {
            u64 lane_cell = (u64)table.lane[at] * HIDDEN + column, cell = step * step_h + lane_cell;
            to.fetch_8(0, gates + cell * 4);
            to.fetch_4(8, step > 0 ? cells + (cell - step_h) : first_c + lane_cell);
            to.fetch_4(12, grad_y + (cell & ~1ull));  // with the neighbour's
        }
        to.close();
    };
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = pass * LANES + place;
        bool there = owner && group + at * lanes.groups < lanes.count;
        u64 cell = (u64)table.lane[at] * HIDDEN + column;
        dc[pass] = there && grad_last_c ? grad_last_c[cell] : 0.0f;
        c_now[pass] = there && table.length[at] > 0 ? cells[(u64)(table.length[at] - 1) * step_h + cell] : 0.0f;
        active[pass] = 0;
        if (there)  // padded steps have no gradient
            for (int step = table.length[at]; step < lanes.steps; step++) *(uint2*)(grads + ((u64)step * step_h + cell) * 4) = make_uint2(0, 0);
        fetch(longest - 1, pass);
    }
    if (PASSES == 1) gather.prepare(table.lane, 4 * HIDDEN, tiles, warpgroup, thread & 127);
    // Step -1 gives the gradient of the initial h.
    for (int step = longest - 1; step >= -1; step--) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            int at = pass * LANES + place, length = owner ? table.length[at] : 0;
            u64 cell = (u64)table.lane[at] * HIDDEN + column;
            float recurrent = 0.0f;
            if (active[pass] > 0) {
                if (PASSES > 1) gather.prepare(table.lane + pass * LANES, 4 * HIDDEN, tiles, warpgroup, thread & 127);
                gather.run(grads + (u64)(step + 1) * step_h * 4 + part * HIDDEN, active[pass], true, BACKWARD_PAUSE, warpgroup);
                own.multiply(tiles, SUMS, warpgroup, warp, lane);
                __syncthreads();
                float quarter[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                u32 lap = ((swaps / RING) & 1) ^ 1;
                u32* post = ring + (u64)(swaps % RING) * gridDim.x * 4 * UNITS * LANES + thread;
                if (owner) {
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        // To each block of the quad what it owns.
                        quarter[n] = total(SUMS, n * UNITS + unit, place);
                        if (n != part) store_word(post + ((u64)(blockIdx.x - part + n) * 4 + part) * UNITS * LANES, (__float_as_uint(quarter[n]) & ~1u) | lap);
                    }
                }
                done();
                parity ^= 1;
                swaps++;
                if (owner) {
                    u32 word[4];
                    u32 missing = 0xFu & ~(1u << part);
                    Patience patience = {PATIENCE};
                    while (missing) {
#pragma unroll
                        for (int n = 0; n < 4; n++)
                            if (missing >> n & 1) word[n] = load_word(post + ((u64)blockIdx.x * 4 + n) * UNITS * LANES);
#pragma unroll
                        for (int n = 0; n < 4; n++)
                            if ((missing >> n & 1) && (word[n] & 1) == lap) missing &= ~(1u << n);
                        patience.spend();
                    }
#pragma unroll
                    for (int n = 0; n < 4; n++) recurrent += n == part ? quarter[n] : __uint_as_float(word[n] & ~1u);
                }
            }
            uint4 kept = Slot{slot.address + pass * THREADS * 16}.read();
            fetch(step - 1, pass);
            float dh = length > step + 1 ? recurrent : 0.0f;
            if (step >= 0 && length > step) {
                float low, high, i, f, g, o, c_before = __uint_as_float(kept.z);
                unpack(kept.w, low, high);
                unpack(kept.x, i, f);
                unpack(kept.y, g, o);
                dh += (column & 1) ? high : low;
                if (step == length - 1 && grad_last_h) dh += grad_last_h[cell];
                float slope = tanh_(c_now[pass]);
                float d_o = dh * slope * o * (1.0f - o);
                float d_c = dc[pass] + dh * o * (1.0f - slope * slope);
                float d_i = d_c * g * i * (1.0f - i), d_f = d_c * c_before * f * (1.0f - f), d_g = d_c * i * (1.0f - g * g);
                store_pair(grads + ((u64)step * step_h + cell) * 4, pack(d_i, d_f), pack(d_g, d_o));
                dc[pass] = d_c * f;
                c_now[pass] = c_before;
                bias[0] += d_i, bias[1] += d_f, bias[2] += d_g, bias[3] += d_o;
            }
            if (step < 0 && length > 0) grad_first_h[cell] = dh;
            active[pass] = step < 0 ? 0 : table.active(pass, step);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = pass * LANES + place;
        u64 cell = (u64)table.lane[at] * HIDDEN + column;
        if (owner && group + at * lanes.groups < lanes.count) {
            grad_first_c[cell] = dc[pass];
            if (table.length[at] == 0) grad_first_h[cell] = grad_last_h ? grad_last_h[cell] : 0.0f;
        }
    }
    __syncthreads();
    if (owner) *(float4*)(partial + (unit * LANES + place) * 4) = make_float4(bias[0], bias[1], bias[2], bias[3]);
    __syncthreads();
    if (thread < UNITS * 4) {
        float sum = 0.0f;
        for (int n = 0; n < LANES; n++) sum += partial[((thread >> 2) * LANES + n) * 4 + (thread & 3)];
        grad_bias[((u64)group * HIDDEN + member * UNITS) * 4 + thread] = sum;
    }
}

// --- before and after ----------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float number(const void* from, int halves, u64 at) {
    if (!halves) return ((const float*)from)[at];
    float low, high;
    unpack(((const u16*)from)[at], low, high);
    return low;
}

// Weights [4, H, I] (float32, or half where `halves`) -> [H padded, 4, pitch], both matrices at once; of the recurrent one also the
// transpose [pitch, H padded, 4] where asked for; and the sum of the biases, [H padded, 4]. Everything beyond H and I is zero.
// A block of 32 x 8 threads has 8 units (32 rows) and 32 columns.
extern "C" __global__ void pack_weights(
    const void* w_ih, const void* w_hh, const void* b_ih, const void* b_hh, int halves, int hidden, int inputs, u16* packed_ih, u16* packed_hh,
    u16* turned_hh, u16* bias, int padded, int pitch_ih) {
    __shared__ u16 tile[32][33];
    bool recurrent = blockIdx.z == 1;
    const void* from = recurrent ? w_hh : w_ih;
    u16* plain = recurrent ? packed_hh : packed_ih;
    int columns = recurrent ? hidden : inputs, pitch = recurrent ? padded : pitch_ih;
    int column = blockIdx.x * 32 + threadIdx.x, unit0 = blockIdx.y * 8;
    if (blockIdx.x * 32 >= pitch) return;
#pragma unroll
    for (int gate = 0; gate < 4; gate++) {
        int unit = unit0 + threadIdx.y;
        u16 value = 0;
        if (unit < hidden && column < columns) value = (u16)pack(number(from, halves, (u64)(gate * hidden + unit) * columns + column), 0.0f);
        if (column < pitch) plain[(u64)(unit * 4 + gate) * pitch + column] = value;
        tile[threadIdx.y * 4 + gate][threadIdx.x] = value;
    }
    if (!recurrent && blockIdx.x == 0 && threadIdx.y == 0) {
        int unit = unit0 + threadIdx.x / 4, row = (threadIdx.x & 3) * hidden + unit;
        float sum = b_ih && unit < hidden ? number(b_ih, halves, row) + number(b_hh, halves, row) : 0.0f;
        bias[unit0 * 4 + threadIdx.x] = (u16)pack(sum, 0.0f);
    }
    if (!recurrent || !turned_hh) return;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int row = blockIdx.x * 32 + threadIdx.y * 4 + n;
        turned_hh[(u64)row * padded * 4 + unit0 * 4 + threadIdx.x] = tile[threadIdx.x][threadIdx.y * 4 + n];
    }
}

// The way back: gradients [H padded, 4, pitch] in half -> [4, H, I], float32 or half; and the biases', summed over the groups.
// A thread has four columns of a row.
extern "C" __global__ void unpack_gradients(
    const u16* packed_ih, const u16* packed_hh, const float* bias, int groups, int halves, int hidden, int inputs, void* w_ih, void* w_hh, void* b,
    int padded, int pitch_ih) {
    bool recurrent = blockIdx.z == 1;
    const u16* from = recurrent ? packed_hh : packed_ih;
    void* to = recurrent ? w_hh : w_ih;
    int columns = recurrent ? hidden : inputs, pitch = recurrent ? padded : pitch_ih;
    int column = (blockIdx.x * 32 + threadIdx.x) * 4, row = blockIdx.y * 8 + threadIdx.y;  // gate * H + unit
    if (row >= 4 * hidden) return;
    int gate = row / hidden, unit = row % hidden;
    if (!recurrent && column == 0) {
        float sum = 0.0f;
        for (int n = 0; n < groups; n++) sum += bias[((u64)n * padded + unit) * 4 + gate];
        for (int n = 0; n < 2; n++) {  // once for each of the two biases
            if (halves) ((u16*)b)[n * 4 * hidden + row] = (u16)pack(sum, 0.0f);
            else ((float*)b)[n * 4 * hidden + row] = sum;
        }
    }
    if (column >= columns || !to) return;
    uint2 four = *(const uint2*)(from + (u64)(unit * 4 + gate) * pitch + column);
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

// A buffer for `words` x 16 bytes that hold WORD_EMPTY. Forward: `h` ([count, H], float32 or half) comes before it, padded with zeros.
// Backward: `ring` comes with it, `zeros` x 16 bytes that are zero.
extern "C" __global__ void prepare(uint4* empty, int words, const void* h, int halves, int count, int hidden, int padded, u16* first, uint4* ring, int zeros) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 n = thread; n < words; n += threads) empty[n] = make_uint4(WORD_EMPTY, WORD_EMPTY, WORD_EMPTY, WORD_EMPTY);
    for (u64 n = thread; n < zeros; n += threads) ring[n] = make_uint4(0, 0, 0, 0);
    for (u64 n = thread; h && n < (u64)count * padded; n += threads) {
        int unit = n % padded;
        first[n] = unit < hidden ? (u16)pack(number(h, halves, n / padded * hidden + unit), 0.0f) : 0;
    }
}
