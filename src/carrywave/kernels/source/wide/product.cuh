// The product of wide.cu: 64 lanes, from registers, times a block's weights in shared memory, and how sums reach the threads that need them.
// Part of wide.cu, whose constants it uses.

// d += a b: 16 numbers of K. `a` is this thread's part of both of its rows.
__device__ __forceinline__ void mma(float (&d)[ROWS / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile(MMA(64) D_LIST ", {%32, %33, %34, %35}, %36, 1, 1, 1, 0;\n" : D_OPS(d) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// Copies this block's weights to shared memory, in tiles of all rows and 64 numbers of K. Row n of a tile comes from `row_of(n)`.
template <typename RowOf>
__device__ __forceinline__ void load_weights(const u16* weights, u64 pitch, u32 tiles, RowOf row_of) {
#pragma unroll 4
    for (int id = threadIdx.x; id < ROWS * HIDDEN / 8; id += THREADS) {
        int n = id / (HIDDEN / 8), piece = id % (HIDDEN / 8);
        uint4 v = *(const uint4*)(weights + row_of(n) * pitch + piece * 8);
        u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int word = 0; word < 4; word++) {
            int chunk = (piece & 4) + word;  // of 16 bytes
            u32 at = tiles + (piece >> 3) * ROWS * 128 + n * 128 + ((chunk ^ (n & 7)) << 4) + (piece & 3) * 4;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(words[word]) : "memory");
        }
    }
}

__device__ __forceinline__ bool whole(const uint4& v) { return v.x != WORD_EMPTY && v.y != WORD_EMPTY && v.z != WORD_EMPTY && v.w != WORD_EMPTY; }

// Polls for this thread's part of operand A and multiplies it. `from`: where the lanes' numbers begin; `row`: the first of this thread's two
// rows, the second is 8 further on; `offset`: of their numbers. Leaves the last products in flight.
__device__ __forceinline__ void multiply(float (&sums)[ROWS / 2], const u16* from, const u32 (&offset)[2], int row, int active, bool published, int pause, u32 tiles) {
#pragma unroll
    for (int n = 0; n < ROWS / 2; n++) sums[n] = 0.0f;
    if (pause > 0 && published) pause_for(pause);
    // Opaque to the compiler at every step, so that it computes addresses when needed instead of keeping them in registers.
    u32 tiles_at = tiles + (threadIdx.x >> 7) * 64;
    asm volatile("" : "+r"(tiles_at));
    u64 b = descriptor(tiles_at);
    Patience patience = {PATIENCE};
#pragma unroll
    for (int first = 0; first < PIECES; first += AT_ONCE) {
        const int count = PIECES - first < AT_ONCE ? PIECES - first : AT_ONCE;
        uint4 piece[AT_ONCE][2];
        u32 missing[2];
#pragma unroll
        for (int half = 0; half < 2; half++) missing[half] = row + 8 * half < active ? (1u << count) - 1 : 0;
        if (first > 0) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");  // registers are about to be overwritten
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (n < count) piece[n][half] = missing[half] ? load_pieces(from + offset[half] + (first + n) * 64) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int begin = 0; begin < AT_ONCE; begin += STAGE) {
            auto check = [&](int low, int high) {
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        if (n >= low && n < high && n < count && (whole(piece[n][half]) || !published)) missing[half] &= ~(1u << n);
            };
            const u32 wanted = (1u << (begin + STAGE)) - (1u << begin);
            check(begin, begin + STAGE);
            while (__any_sync(0xFFFFFFFFu, (missing[0] | missing[1]) & wanted)) {
                check(begin + STAGE, AT_ONCE);
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        if (n >= begin && n < count && (missing[half] >> n & 1)) piece[n][half] = load_pieces(from + offset[half] + (first + n) * 64);
                check(begin, begin + STAGE);
                patience.spend();
            }
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                if (n < begin || n >= begin + STAGE || n >= count) continue;
                u64 tile = b + (((first + n) * ROWS * 128) >> 4);
                mma(sums, piece[n][0].x, piece[n][1].x, piece[n][0].y, piece[n][1].y, tile);
                mma(sums, piece[n][0].z, piece[n][1].z, piece[n][0].w, piece[n][1].w, tile + (32 >> 4));
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        }
    }
}

// Waits for the products and adds up those of the two warpgroups: the first one keeps the upper row of each thread, the second the lower.
__device__ __forceinline__ void add_up(float (&sums)[ROWS / 2], float (&own)[UNITS], u32 halves) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    // Keeps the compiler from reading the sums before the wait.
#pragma unroll
    for (int n = 0; n < ROWS / 2; n++) asm volatile("" : "+f"(sums[n])::"memory");
    int warpgroup = threadIdx.x >> 7;
    u32 to = halves + (warpgroup * EACH * 128 + (threadIdx.x & 127)) * 16, from = halves + ((1 - warpgroup) * EACH * 128 + (threadIdx.x & 127)) * 16;
#pragma unroll
    for (int n = 0; n < UNITS; n++) own[n] = warpgroup ? sums[n / 2 * 4 + 2 + n % 2] : sums[n / 2 * 4 + n % 2];
#pragma unroll
    for (int n = 0; n < UNITS; n += 4) {
        float given[4];
#pragma unroll
        for (int m = 0; m < 4; m++) given[m] = warpgroup ? sums[(n + m) / 2 * 4 + m % 2] : sums[(n + m) / 2 * 4 + 2 + m % 2];
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + n / 4 * 2048), "f"(given[0]), "f"(given[1]), "f"(given[2]), "f"(given[3]) : "memory");
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < UNITS; n += 4) {
        float4 v;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from + n / 4 * 2048) : "memory");
        own[n] += v.x, own[n + 1] += v.y, own[n + 2] += v.z, own[n + 3] += v.w;
    }
    if (SUM_BUFFERS == 1) __syncthreads();
}

__device__ __forceinline__ u32 word_of(const uint4& v, int n) { return n == 0 ? v.x : n == 1 ? v.y : n == 2 ? v.z : v.w; }

// The exchange between the four blocks of a quad, as in persistent.cu: from each of the others, a thread gets the sums of its own units.
struct Swap {
    u32 shared;  // [RING, 4, THREADS] of 16 bytes, then one barrier for each of the RING turns
    int part;

    __device__ __forceinline__ Arrival arrival(int turn) const { return {shared + RING_BYTES + (turn % RING) * 8}; }
    __device__ __forceinline__ u32 at(int turn, int from) const { return shared + ((turn % RING * 4 + from) * THREADS + threadIdx.x) * 16; }
    __device__ __forceinline__ void begin() const {
        for (int n = 0; n < RING; n++) arrival(n).begin();
    }
    __device__ __forceinline__ void give(int turn, const float (&sums)[UNITS]) const {
#pragma unroll
        for (int to = 0; to < 4; to++) {
            if (to == part) continue;
            u32 v[4];
#pragma unroll
            for (int n = 0; n < 4; n++) v[n] = __float_as_uint(sums[to * EACH + n]);
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(in_block(at(turn, part), to)), "r"(v[0]), "r"(v[1]),
                         "r"(v[2]), "r"(v[3]), "r"(in_block(arrival(turn).address, to))
                         : "memory");
        }
    }
    // The sums of all four parts, including this block's own, always in the same order. All threads must call it.
    __device__ __forceinline__ void sum(int turn, const float (&sums)[UNITS], float (&total)[EACH]) const {
        arrival(turn).wait(turn / RING, 3 * OWNERS * 4);
#pragma unroll
        for (int n = 0; n < EACH; n++) total[n] = 0.0f;
#pragma unroll
        for (int from = 0; from < 4; from++) {
            uint4 given = load_smem(at(turn, from));
#pragma unroll
            for (int n = 0; n < EACH; n++) total[n] += from == part ? sums[from * EACH + n] : __uint_as_float(word_of(given, n));
        }
    }
};
