// Data exchange between blocks: inside a cluster it goes from shared memory to shared memory, a much shorter way than through L2. Part of
// persistent.cu and joined.cu, whose constants it uses.

// The exchange between the four blocks of a quad: one float per owner, from each of the other blocks. Inside clusters, a barrier counts the
// bytes; through global memory, the lowest bit of a word tells which lap through the ring it belongs to.
struct Swap {
    u32* ring;
    u32 shared;  // [RING, 4, OWNERS], then one barrier for each of the RING turns
    int part;

    __device__ __forceinline__ Arrival arrival(int turn) const { return {shared + RING_BYTES + (turn % RING) * 8}; }
    __device__ __forceinline__ void begin() const {
#if CLUSTER
        for (int n = 0; n < RING; n++) arrival(n).begin();
#endif
    }
    __device__ __forceinline__ void give(int turn, int to, float sum) const {
#if CLUSTER
        int rank = NEAR ? blockIdx.x % CLUSTER - part + to : to;
        u32 there = in_block(shared + (u32)((turn % RING * 4 + part) * OWNERS + OWNED) * 4, rank), barrier = in_block(arrival(turn).address, rank);
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(__float_as_uint(sum)), "r"(barrier) : "memory");
#else
        u32 lap = (turn / RING & 1) ^ 1;
        store_word(ring + (((u64)(turn % RING) * gridDim.x + blockIdx.x - part + to) * 4 + part) * OWNERS + OWNED, (__float_as_uint(sum) & ~1u) | lap);
#endif
    }
    // The sum of all four parts, including this block's own, always in the same order; and the parts. All threads must call it.
    __device__ __forceinline__ float sum(int turn, const float (&quarter)[4], bool owner, float (&parts)[4]) const {
        u32 word[4];
#if CLUSTER
        arrival(turn).wait(turn / RING, 3 * OWNERS * 4);
        if (!owner) return 0.0f;
#pragma unroll
        for (int n = 0; n < 4; n++)
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[n]) : "r"(shared + (u32)((turn % RING * 4 + n) * OWNERS + OWNED) * 4) : "memory");
#else
        if (!owner) return 0.0f;
        u32 lap = (turn / RING & 1) ^ 1, missing = 0xFu & ~(1u << part);
        const u32* post = ring + ((u64)(turn % RING) * gridDim.x + blockIdx.x) * 4 * OWNERS + OWNED;
        Patience patience = {PATIENCE};
        while (missing) {
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (missing >> n & 1) word[n] = load_word(post + n * OWNERS);
#pragma unroll
            for (int n = 0; n < 4; n++)
                if ((missing >> n & 1) && (word[n] & 1) == lap) missing &= ~(1u << n);
            patience.spend();
        }
#endif
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            parts[n] = n == part ? quarter[n] : __uint_as_float(CLUSTER ? word[n] : word[n] & ~1u);
            total += parts[n];
        }
        return total;
    }
};

// If a whole group is one cluster (NEAR), the data that a step needs from other blocks is written directly into the operand's tiles, and a
// barrier in the receiver's shared memory counts the bytes. A block first stages its data contiguously in its own shared memory and sends
// it from there in whole lines, which is faster than from where it was computed; the tiles are laid out so that it is contiguous there
// too (no swizzle: 8 lanes x 16 bytes lie together, then the other lanes, then the next 8 of K). Everything is double-buffered: a block
// sends for turn t + 2 only after it has received turn t + 1 from all others, and they sent that after they were done with turn t.
struct Near {
    u32 tiles, staged;  // two each; after the two staging buffers, one barrier for each

    __device__ __forceinline__ Arrival arrival(int turn) const { return {staged + 2 * STAGE_BYTES + (turn & 1) * 8}; }
    __device__ __forceinline__ void begin() const {
#if NEAR
        arrival(0).begin(), arrival(1).begin();
        for (int n = threadIdx.x * 16; n < 2 * STAGE_BYTES; n += THREADS * 16) store_smem(staged + n, make_uint4(0, 0, 0, 0));
#endif
    }
    // The tiles of a turn; turn -1, before the first, uses the second buffer.
    __device__ __forceinline__ u32 tiles_of(int turn) const { return tiles + (NEAR ? (turn & 1) * B_BYTES : 0); }

    // The staging address of a number of this block, by its position in the block's part of K and its lane; for writes of 4 or 8 bytes.
    __device__ __forceinline__ u32 place_of(int turn, int k, int row) const {
        return staged + (turn & 1) * STAGE_BYTES + (k / 8) * LANES * 16 + row * 16 + (k & 7) * 2;
    }
    // Sends the staged data to `count` blocks, from rank `first` on in steps of `stride`, to where this block's part begins in their K.
    // All threads must call it.
    __device__ __forceinline__ void send(int turn, int k, int bytes, int first, int stride, int count) const {
#if NEAR
        u32 from = staged + (turn & 1) * STAGE_BYTES, to = tiles_of(turn) + (k / 8) * LANES * 16, barrier = arrival(turn).address;
        __syncthreads();
        int pieces = bytes / 16;
        for (int n = threadIdx.x; n < pieces * count; n += THREADS) {
            int rank = first + n / pieces * stride, at = n % pieces * 16;
            uint4 v = load_smem(from + at);
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(in_block(to + at, rank)), "r"(v.x), "r"(v.y), "r"(v.z),
                         "r"(v.w), "r"(in_block(barrier, rank))
                         : "memory");
        }
#endif
    }
    // Waits for all data of a turn.
    __device__ __forceinline__ void receive(int turn) const {
#if NEAR
        arrival(turn).wait(turn >> 1, HIDDEN * LANES * 2);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }
};
