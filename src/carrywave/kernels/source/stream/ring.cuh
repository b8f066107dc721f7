// How a block of stream.cu gets the other blocks' numbers: a warp of its own copies them, as they are published, into a ring of stages in
// shared memory. Part of stream.cu, whose constants it uses.

__device__ __forceinline__ void barrier_begin(u32 barrier, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// An arrival at the barrier of another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, rank)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 lap) {
    Patience patience = {PATIENCE};
    u32 there = 0;
    while (!there) {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(there) : "r"(barrier), "r"(lap & 1) : "memory");
        patience.spend();
    }
}

// How far a block has come; and the least of four neighbouring blocks.
__device__ __forceinline__ u32 acquire_word(const u32* address) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}
__device__ __forceinline__ u32 acquire_least(const u32* address) {
    u32 a, b, c, d;
    asm volatile("ld.acquire.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(address) : "memory");
    return min(min(a, b), min(c, d));
}

// The stages: chunk number n since the launch began is in stage n % STAGES. The blocks of a cluster need the same chunks: number n % CLUSTER of
// them copies chunk n to all. Each stage has two barriers: "full" counts the bytes that arrive in this block; at "empty" of the block that
// copies, all say that they have read what was in the stage. STAGES is a multiple of CLUSTER, so it is always the same one.
struct Ring {
    u32 tiles, barriers;
    int rank;  // in the cluster

    __device__ __forceinline__ void begin() const {
        for (int n = threadIdx.x; n < 2 * STAGES + PASSES; n += blockDim.x) {
            barrier_begin(barriers + n * 8, n < 2 * STAGES ? (n & 1 ? CLUSTER : 1) : THREADS / 32);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            if (n < 2 * STAGES && !(n & 1)) barrier_expect(barriers + n * 8, CHUNK_BYTES);
        }
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __device__ __forceinline__ u32 tile(u32 stage) const { return tiles + stage * CHUNK_BYTES; }
    __device__ __forceinline__ u32 full(u32 stage) const { return barriers + stage * 16; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barriers + stage * 16 + 8; }
    __device__ __forceinline__ u32 collected(int pass) const { return barriers + STAGES * 16 + pass * 8; }

    // One thread: copy a chunk as soon as its stage is free everywhere.
    __device__ __forceinline__ void copy(u32 number, const unsigned char* from) const {
        u32 stage = number % STAGES, lap = number / STAGES;
        if (lap > 0) barrier_wait(empty(stage), lap - 1);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(tile(stage)), "l"(from), "r"(CHUNK_BYTES), "r"(full(stage)), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
    }
    // One thread of the warpgroup that has read a stage: it is ready for the next chunk.
    __device__ __forceinline__ void release(u32 stage) const {
        barrier_expect(full(stage), CHUNK_BYTES);
        barrier_arrive_at(empty(stage), stage % CLUSTER);
    }
};

// What the blocks of a group tell each other, in global memory: chunks of 64 numbers of K for all lanes of a pass, laid out as the product reads
// them from shared memory (8 numbers of each lane together, then the next 8), those of two steps in turn; and for each pass and block, how far it
// has come. A block publishes the numbers of a step only after it has read all of the step before, which the others have published after
// reading the one before that: so two are enough.
//
// Both ways the numbers go by bulk copies. A block collects its part of a chunk in shared memory; a thread that does nothing else copies it, waits
// until it has arrived, and releases the mark. A thread that computes would wait there for all else that it has written, which takes several
// times as long; and without the release, blocks read old numbers now and then.
template <int CHUNKS>
struct Exchange {
    unsigned char* chunks;  // [2, groups, PASSES, CHUNKS, LANES, 128]
    u32* marks;             // [groups, PASSES, BLOCKS_OF_GROUP], zeroed
    int groups, group;

    __device__ __forceinline__ unsigned char* of(int turn, int pass, int chunk) const {
        return chunks + ((u64)(((turn & 1) * groups + group) * PASSES + pass) * CHUNKS + chunk) * CHUNK_BYTES;
    }
    __device__ __forceinline__ u32* mark(int pass, int member) const { return marks + (group * PASSES + pass) * BLOCKS_OF_GROUP + member; }
    // Where a lane's numbers go that begin `k` into this block's part of a chunk.
    static __device__ __forceinline__ u32 at(u32 staged, int pass, int place, int k) { return staged + pass * STAGED_BYTES + (k >> 3) * LANES * 16 + place * 16 + (k & 7) * 2; }

    // All threads that compute call it after they have collected their part of a pass. Another thread publishes it.
    __device__ __forceinline__ void collected(const Ring& ring, int pass) const {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(ring.collected(pass));
    }
    // The publishing thread; `laps`: a bit for each pass.
    __device__ __forceinline__ void publish(const Ring& ring, u32& laps, u32 staged, int turn, int pass, int member, u32 value) const {
        const int parts = BLOCKS_OF_GROUP / CHUNKS, bytes = CHUNK_BYTES / parts;
        barrier_wait(ring.collected(pass), laps >> pass);
        laps ^= 1u << pass;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(of(turn, pass, member / parts) + member % parts * bytes), "r"(staged + pass * STAGED_BYTES), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;" ::: "memory");
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(mark(pass, member)), "r"(value) : "memory");
    }

    // The loading warp: copies those of a pass's chunks that this block copies, of KBLOCKS from `first` on.
    __device__ __forceinline__ void load(const Ring& ring, u32& number, int turn, int pass, int first, u32 wanted) const {
        int lane = threadIdx.x & 31;
        bool waits = lane < KBLOCKS && lane % CLUSTER == ring.rank;
        const u32* at = mark(pass, (first + lane) * (BLOCKS_OF_GROUP / CHUNKS));
        u32 missing = 0xFFFFFFFFu;
        Patience patience = {PATIENCE};
        for (int chunk = ring.rank; chunk < KBLOCKS; chunk += CLUSTER) {
            while (missing >> chunk & 1) {
                if (waits) waits = BLOCKS_OF_GROUP == CHUNKS ? acquire_word(at) < wanted : acquire_least(at) < wanted;
                missing = __ballot_sync(0xFFFFFFFFu, waits);
                __syncwarp();  // what every thread has acquired comes before the copy by the first: the ballot alone orders no memory
                asm volatile("fence.proxy.async.global;" ::: "memory");
                patience.spend();
            }
            if (lane == 0) ring.copy(number + chunk, of(turn, pass, first + chunk));
            __syncwarp();
        }
        number += KBLOCKS;
    }
};

// The exchange between the four blocks of a quad: from each of the others, a thread gets the sums of its own units. The lowest bit of a word
// tells which lap through the ring it belongs to. A block writes a place again only after it has received the other's next sums.
#define TURNS 2
struct Swap {
    u32* words;  // [TURNS, blocks, 4, THREADS, EACH], zeroed
    int quad, part;  // the first block of the quad, counted over all groups

    __device__ __forceinline__ u32* at(int turn, int to, int from) const {
        return words + ((((u64)(turn % TURNS) * gridDim.x + quad + to) * 4 + from) * THREADS + threadIdx.x) * EACH;
    }
    // `of`: reads what the thread has for one of the four.
    template <typename Of>
    __device__ __forceinline__ void give(int turn, Of of) const {
        u32 lap = (turn / TURNS & 1) ^ 1;
#pragma unroll
        for (int n = 1; n < 4; n++) {
            int to = (part + n) & 3;
            float sums[EACH];
            u32 v[EACH];
            of(sums, to);
#pragma unroll
            for (int n = 0; n < EACH; n++) v[n] = (__float_as_uint(sums[n]) & ~1u) | lap;
            store_pieces(at(turn, to, part), make_uint4(v[0], v[1], v[2], v[3]));
        }
    }
    // The sums of all four parts, this block's own first, then the next one's, around.
    template <typename Of>
    __device__ __forceinline__ void sum(int turn, float (&total)[EACH], Of of) const {
        u32 lap = (turn / TURNS & 1) ^ 1, v[3][EACH], missing = 7;
        Patience patience = {PATIENCE};
        while (missing) {
#pragma unroll
            for (int n = 0; n < 3; n++) {
                if (!(missing >> n & 1)) continue;
                uint4 got = load_pieces(at(turn, part, (part + n + 1) & 3));
                v[n][0] = got.x, v[n][1] = got.y, v[n][2] = got.z, v[n][3] = got.w;
            }
#pragma unroll
            for (int n = 0; n < 3; n++) {
                bool there = true;
#pragma unroll
                for (int m = 0; m < EACH; m++) there = there && (v[n][m] & 1) == lap;
                if (there) missing &= ~(1u << n);
            }
            patience.spend();
        }
        of(total, part);
#pragma unroll
        for (int n = 0; n < EACH; n++)
#pragma unroll
            for (int m = 0; m < 3; m++) total[n] += __uint_as_float(v[m][n] & ~1u);
    }
};
