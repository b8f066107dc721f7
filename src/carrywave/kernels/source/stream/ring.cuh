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

// The stages: chunk number n since the launch began is in stage n % STAGES. Each has two barriers: "full" counts the bytes that arrive. The blocks of
// a cluster need the same chunks: block number n % CLUSTER of it copies chunk n to all of them, once all have said that they are done with the stage, at
// its barrier "empty".
struct Ring {
    u32 tiles, barriers;
    int rank;  // in the cluster

    __device__ __forceinline__ void begin() const {
        for (int n = threadIdx.x; n < 2 * STAGES + PASSES; n += blockDim.x) {
            barrier_begin(barriers + n * 8, n < 2 * STAGES ? (n & 1 ? COPIES : 1) : THREADS / 32);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            if (n < 2 * STAGES && !(n & 1)) barrier_expect(barriers + n * 8, CHUNK_BYTES);
        }
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __device__ __forceinline__ u32 tile(u32 stage) const { return tiles + stage * CHUNK_BYTES; }
    __device__ __forceinline__ u32 full(u32 stage) const { return barriers + stage * 16; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barriers + stage * 16 + 8; }
    __device__ __forceinline__ u32 written(int pass) const { return barriers + STAGES * 16 + pass * 8; }

    // One thread: copy a chunk as soon as its stage is free everywhere.
    __device__ __forceinline__ void copy(u32 number, const unsigned char* from) const {
        u32 stage = number % STAGES, lap = number / STAGES;
        if (lap > 0) barrier_wait(empty(stage), lap - 1);
#if COPIES > 1
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(tile(stage)), "l"(from), "r"(CHUNK_BYTES), "r"(full(stage)), "h"((u16)((1 << COPIES) - 1)) : "memory");
#else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(tile(stage)), "l"(from), "r"(CHUNK_BYTES), "r"(full(stage)) : "memory");
#endif
    }
    // One thread of the warpgroup that has read a stage: it is ready for the next chunk.
    __device__ __forceinline__ void release(u32 stage) const {
        barrier_expect(full(stage), CHUNK_BYTES);
        if (COPIES > 1) barrier_arrive_at(empty(stage), stage % COPIES);
        else barrier_arrive(empty(stage));
    }
};

// What the blocks of a group tell each other, in global memory: chunks of 64 numbers of K for all lanes of a pass, laid out as the product reads them
// from shared memory (8 numbers of each lane together, then the next 8), those of two steps in turn; and for each pass and block, how far it
// has come. A block publishes the numbers of a step only after it has read all of the step before, which the others have published after
// reading the one before that: so two are enough.
//
// Both ways the numbers go by bulk copies: a block collects its part of a chunk in shared memory, and the thread that copies it waits until it has
// arrived. A fence would wait for all else that the block has written besides, which takes several times as long.
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

    // All threads that compute call it after they have written their part of a pass; another thread publishes it. `laps`: that thread's bit for each pass.
    __device__ __forceinline__ void written(const Ring& ring, u32 staged, int turn, int pass, int member, u32 value) const {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#if PUBLISHER
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(ring.written(pass));
#else
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
        if (threadIdx.x == 0) send(staged, turn, pass, member, value);
#endif
    }
    __device__ __forceinline__ void publish(const Ring& ring, u32& laps, u32 staged, int turn, int pass, int member, u32 value) const {
        barrier_wait(ring.written(pass), laps >> pass);
        laps ^= 1u << pass;
        send(staged, turn, pass, member, value);
    }
    __device__ __forceinline__ void send(u32 staged, int turn, int pass, int member, u32 value) const {
        const int parts = BLOCKS_OF_GROUP / CHUNKS, bytes = CHUNK_BYTES / parts;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(of(turn, pass, member / parts) + member % parts * bytes), "r"(staged + pass * STAGED_BYTES), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;" ::: "memory");
#if ORDERED
        asm volatile("fence.proxy.async.global;\n\tfence.acq_rel.gpu;" ::: "memory");
#endif
        store_word(mark(pass, member), value);
    }

    // The loading warp: copies those of a pass's chunks that this block copies, of KBLOCKS from `first` on, `turned` by some so that not all blocks read the same one.
    __device__ __forceinline__ void load(const Ring& ring, u32& number, int turn, int pass, int first, int turned, u32 wanted) const {
        int lane = threadIdx.x & 31, mine = lane + turned;
        mine = first + (mine >= KBLOCKS ? mine - KBLOCKS : mine);
        bool waits = lane < KBLOCKS && lane % COPIES == ring.rank;
        const u32* at = mark(pass, mine * (BLOCKS_OF_GROUP / CHUNKS));
        u32 missing = 0xFFFFFFFFu;
        Patience patience = {PATIENCE};
        for (int chunk = ring.rank; chunk < KBLOCKS; chunk += COPIES) {
            if (missing >> chunk & 1) {
                while (missing >> chunk & 1) {
                    if (waits) {
                        if (BLOCKS_OF_GROUP == CHUNKS) waits = load_word(at) < wanted;
                        else {
                            uint4 v = load_pieces(at);
                            waits = min(min(v.x, v.y), min(v.z, v.w)) < wanted;
                        }
                    }
                    missing = __ballot_sync(0xFFFFFFFFu, waits);
                    patience.spend();
                }
#if ORDERED
                asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
                __syncwarp();
                asm volatile("fence.proxy.async.global;" ::: "memory");
            }
            int from = chunk + turned;
            if (lane == 0) ring.copy(number + chunk, of(turn, pass, first + (from >= KBLOCKS ? from - KBLOCKS : from)));
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
#if LANES == 64
            store_pieces(at(turn, to, part), make_uint4(v[0], v[1], v[2], v[3]));
#else
            store_pair(at(turn, to, part), v[0], v[1]);
#endif
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
#if LANES == 64
                uint4 got = load_pieces(at(turn, part, (part + n + 1) & 3));
                v[n][0] = got.x, v[n][1] = got.y, v[n][2] = got.z, v[n][3] = got.w;
#else
                uint2 got = load_pair(at(turn, part, (part + n + 1) & 3));
                v[n][0] = got.x, v[n][1] = got.y;
#endif
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
