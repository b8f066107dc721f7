// A block's matrix product: its tiles of weights, kept on the chip, times an operand in shared memory. Part of persistent.cu and joined.cu, whose
// constants it uses.

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
#define D_OPS(d) D16(d, 0)
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

// The first 64-wide block of K of a warpgroup, if STRIDE of them share the blocks.
template <int STRIDE>
__device__ __forceinline__ int first_block(int warpgroup) {
    return STRIDE == WARPGROUPS ? warpgroup : warpgroup % STRIDE;
}

// The weights of a block: tiles of 64 rows. A thread holds parts of two rows of each, in the layout of wgmma's operand A.
struct Weights {
    u32 fragment[KREG > 0 ? KREG : 1][TILES][4][4];
    u32 shared;  // those of this warpgroup that do not fit into registers

    // `row0`: this thread's first row of the first tile, at the first column of this block's K; its second row is `to_second` numbers
    // further on, the next tile `to_next`. Of the END 64-wide blocks of K, STRIDE warpgroups take turns. Without
    // `any`, all weights are zero.
    template <int STRIDE = WARPGROUPS, int END = KBLOCKS>
    __device__ __forceinline__ void load(const u16* row0, u64 to_second, u64 to_next, u32 tiles, int warpgroup, int warp, int lane, bool any = true) {
        int q = lane & 3, row = warp * 16 + (lane >> 2);
        shared = tiles + warpgroup * KSHARED * TILES * 8192;
#pragma unroll
        for (int i = 0; i < KPW; i++) {
            int block = first_block<STRIDE>(warpgroup) + STRIDE * i;
#pragma unroll
            for (int m = 0; m < TILES; m++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 part[4];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int k = j * 16 + half * 8 + q * 2;
                        const u16* from = row0 + m * to_next + block * 64 + k;
                        bool there = block < END && any;
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

    // Writes sums[64 * TILES, LANES] over this warpgroup's part of K to `out`.
    __device__ __forceinline__ void multiply(u32 tiles, float* out, int warpgroup, int warp, int lane) const {
        float sums[TILES][LANES / 2];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < LANES / 2; n++) sums[m][n] = 0.0f;
        // Opaque to the compiler at every step, so that it computes addresses when needed instead of keeping them in registers.
        u32 weights_at = shared, tiles_at = tiles + warpgroup * (NEAR ? 1 : KPW) * LANES * 128;
        asm volatile("" : "+r"(weights_at), "+r"(tiles_at));
        u64 b = NEAR ? plain_descriptor(tiles_at) : descriptor(tiles_at);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < KREG; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u64 from = further(b, NEAR ? i * WARPGROUPS * LANES * 128 + j * LANES * 32 : i * LANES * 128 + j * 32);
#pragma unroll
                for (int m = 0; m < TILES; m++) mma_registers(sums[m], fragment[i][m][j], from);
            }
        }
        constexpr int UNROLLED = TILES == 2 ? 1 : KPW;  // with two tiles there are no registers for more
#pragma unroll UNROLLED
        for (int i = KREG; i < KPW; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u64 from = further(b, NEAR ? i * WARPGROUPS * LANES * 128 + j * LANES * 32 : i * LANES * 128 + j * 32);
#pragma unroll
                for (int m = 0; m < TILES; m++) mma_shared(sums[m], further(descriptor(weights_at), ((i - KREG) * TILES + m) * 8192 + j * 32), from);
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        // Keeps the compiler from reading the sums before the wait.
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

// The partial sums of all warpgroups; with one buffer, `done` waits until it may be overwritten.
#define SUMS (partial + (SUM_BUFFERS == 2 ? parity : 0) * WARPGROUPS * RED_FLOATS)
__device__ __forceinline__ void done() {
    if (SUM_BUFFERS == 1) __syncthreads();
}

// The warpgroups' partial sums for one row and lane, added up, always in the same order.
__device__ __forceinline__ float total(const float* partial, int row, int place) {
    const float* at = partial + row * ROW_PITCH + place;
    float sum = at[0];
#pragma unroll
    for (int n = 1; n < WARPGROUPS; n++) sum += at[n * RED_FLOATS];
    return sum;
}
