// The product of stream.cu: a block's weights, kept in registers and in shared memory, times chunks of an operand in the stages of a ring.
// Part of stream.cu, whose constants it uses.

__device__ __forceinline__ void mma_registers(float (&d)[LANES / 2], const u32 (&a)[4], u64 b) {
    asm volatile(MMA(64) D_LIST ", {%32, %33, %34, %35}, %36, 1, 1, 1, 0;\n" : D_OPS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void mma_shared(float (&d)[LANES / 2], u64 a, u64 b) {
    asm volatile(MMA(64) D_LIST ", %32, %33, 1, 1, 1, 0, 0;\n" : D_OPS(d) : "l"(a), "l"(b));
}

// The weights of a block: 64 rows. Warpgroup w has every second chunk of K, from chunk w on: the first KREG of them in registers, in the
// layout of wgmma's operand A, where a thread holds parts of two rows; the rest in shared memory.
struct Weights {
    u32 fragment[KREG > 0 ? KREG : 1][4][4];
    u32 shared;

    // `row0`, `row8`: where this thread's two rows begin in this block's K.
    __device__ __forceinline__ void load(const u16* row0, const u16* row8, u32 tiles, int warpgroup, int row, int quarter) {
        shared = tiles + warpgroup * KSHARED * 8192;
#pragma unroll
        for (int i = 0; i < KPW; i++) {
            int chunk = 2 * i + warpgroup;
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int k = j * 16 + half * 8 + quarter * 2;
                    u32 upper = chunk < KBLOCKS ? *(const u32*)(row0 + chunk * 64 + k) : 0, lower = chunk < KBLOCKS ? *(const u32*)(row8 + chunk * 64 + k) : 0;
                    if (i < KREG) {
                        fragment[i < KREG ? i : 0][j][half * 2] = upper, fragment[i < KREG ? i : 0][j][half * 2 + 1] = lower;
                    } else {
                        u32 tile = shared + (i - KREG) * 8192 + ((((k >> 3) ^ (row & 7)) << 4) | ((k & 7) * 2));
                        asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + row * 128), "r"(upper) : "memory");
                        asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + (row + 8) * 128), "r"(lower) : "memory");
                    }
                }
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    }

    // sums[64, LANES] over this warpgroup's part of K; `first`: the number of the pass's first chunk.
    __device__ __forceinline__ void multiply(float (&sums)[LANES / 2], const Ring& ring, u32 first, int warpgroup) const {
#pragma unroll
        for (int n = 0; n < LANES / 2; n++) sums[n] = 0.0f;
        u32 stage = (first + warpgroup) % STAGES, lap = (first + warpgroup) / STAGES, before = 0;
        // Opaque to the compiler at every step, so that it computes addresses when needed instead of keeping them in registers.
        u32 weights_at = shared;
        asm volatile("" : "+r"(weights_at));
#pragma unroll
        for (int i = 0; i < KPW; i++) {
            if (2 * i + 1 >= KBLOCKS && warpgroup) break;
            barrier_wait(ring.full(stage), lap);
            u64 b = plain_descriptor(ring.tile(stage));
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (i < KREG) mma_registers(sums, fragment[i < KREG ? i : 0][j], b + ((j * LANES * 32) >> 4));
                else mma_shared(sums, descriptor(weights_at + (i - KREG) * 8192) + ((j * 32) >> 4), b + ((j * LANES * 32) >> 4));
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (i > 0) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if ((threadIdx.x & 127) == 0) ring.release(before);
            }
            before = stage;
            stage += 2;
            if (stage >= STAGES) stage -= STAGES, lap++;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if ((threadIdx.x & 127) == 0) ring.release(before);
        // Keeps the compiler from reading the sums before the wait.
#pragma unroll
        for (int n = 0; n < LANES / 2; n++) asm volatile("" : "+f"(sums[n])::"memory");
    }
};

// The two warpgroups' sums meet in shared memory, [2, LANES, PITCH]: a lane's 64 rows lie together.
__device__ __forceinline__ void put(const float (&sums)[LANES / 2], float* both, int warpgroup, int row, int quarter) {
    float* at = both + (warpgroup * LANES + quarter * 2) * PITCH + row;
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");  // all have read those of the pass before
#pragma unroll
    for (int n = 0; n < LANES / 8; n++) {
        at[n * 8 * PITCH] = sums[n * 4], at[(n * 8 + 1) * PITCH] = sums[n * 4 + 1];
        at[n * 8 * PITCH + 8] = sums[n * 4 + 2], at[(n * 8 + 1) * PITCH + 8] = sums[n * 4 + 3];
    }
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
// Four neighbouring rows of a lane: both added up.
__device__ __forceinline__ void take(float (&sums)[4], const float* both, int place, int row) {
    float4 a = *(const float4*)(both + place * PITCH + row), b = *(const float4*)(both + (LANES + place) * PITCH + row);
    sums[0] = a.x + b.x, sums[1] = a.y + b.y, sums[2] = a.z + b.z, sums[3] = a.w + b.w;
}
