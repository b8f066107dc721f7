// How a block gets data from other blocks and from memory: polling, dealing of lanes, prefetch. Part of persistent.cu, whose constants it uses.

struct Lanes {
    const int* order;    // lanes from longest to shortest, or null: in order of their numbers
    const int* lengths;  // of each lane, or null: every step is real
    int count;           // number of lanes
    int groups;
    int steps;
};

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

// Bounds a wait: if it takes seconds, a block is missing, and the launch is aborted with an error.
struct Patience {
    int left;
    __device__ __forceinline__ void spend() {
        if (--left < 0) asm volatile("trap;");
    }
};
#define PATIENCE 20000000

// Copies this warpgroup's part of K, for the lanes of a pass, from global to shared memory, in pieces of 16 bytes.
//
// Piece n of a thread is number n * 128 + thread in the warpgroup's part, counted by block of K, then by row. Rows repeat after PERIOD
// pieces, SKIP blocks of K further on, so that few addresses are needed.
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

// Very wide layers leave few registers: the pieces are then loaded in two batches.
#define AT_ONCE (KPW > 5 && PIECES > 4 ? (PIECES + 1) / 2 : PIECES)

struct Gather {
    u32 offset[PERIOD], target[PERIOD];
    int row[PERIOD];
    u32 there;  // bit mask of the pieces that exist

    __device__ __forceinline__ void prepare(const int* lane_of, int pitch, u32 tiles, int warpgroup, int thread) {
        there = 0;
#pragma unroll
        for (int n = 0; n < PERIOD; n++) {
            int id = n * 128 + thread, i = id / (8 * LANES);
            row[n] = (id % (8 * LANES)) / 8;
            offset[n] = (u32)lane_of[row[n]] * pitch + (warpgroup + WARPGROUPS * i) * 64 + (id & 7) * 8;
            if (NEAR) target[n] = tiles + (warpgroup + WARPGROUPS * i) * LANES * 128 + (id & 7) * LANES * 16 + row[n] * 16;
            else target[n] = tiles + (warpgroup * KPW + i) * LANES * 128 + row[n] * 128 + (((id & 7) ^ (row[n] & 7)) << 4);
        }
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            int id = n * 128 + thread;
            there |= id < CHUNKS && warpgroup + WARPGROUPS * (id / (8 * LANES)) < KBLOCKS ? 1u << n : 0;
        }
    }

    // `published`: other blocks write the data during this launch, so it may not be there yet.
    // `pause`: clock cycles to wait before the first poll. Polling too early only delays the memory traffic that it waits for.
    __device__ __forceinline__ void run(const u16* from, int active, bool published, int pause, int warpgroup) const {
        u32 missing = there;
        if (active < LANES) {
#pragma unroll
            for (int n = 0; n < PIECES; n++) missing &= row[n % PERIOD] < active ? ~0u : ~(1u << n);
        }
        if (pause > 0 && published) {
            u32 now = clock();
            while ((u32)clock() - now < pause) continue;
        }
        Patience patience = {PATIENCE};
#pragma unroll
        for (int first = 0; first < PIECES; first += AT_ONCE) {
            uint4 piece[AT_ONCE];
            u32 asked = AT_ONCE < PIECES ? missing >> first & ((1u << AT_ONCE) - 1) : missing;
            while (__any_sync(0xFFFFFFFFu, asked)) {
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++)
                    if (asked >> n & 1) piece[n] = load_pieces(from + offset[(first + n) % PERIOD] + ((first + n) / PERIOD) * SKIP * WARPGROUPS * 64);
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++) {
                    bool whole = piece[n].x != WORD_EMPTY && piece[n].y != WORD_EMPTY && piece[n].z != WORD_EMPTY && piece[n].w != WORD_EMPTY;
                    if ((asked >> n & 1) && (whole || !published)) {
                        store_smem(target[(first + n) % PERIOD] + ((first + n) / PERIOD) * SKIP * (NEAR ? WARPGROUPS : 1) * LANES * 128, piece[n]);
                        asked &= ~(1u << n);
                    }
                }
                patience.spend();
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
    }
};

// The lanes of a group, longest first; [LANES * PASSES] each.
struct Table {
    int* lane;
    int* length;  // 0: no lane here, or one without real steps

    __device__ __forceinline__ void fill(const Lanes& lanes, int group, int thread) {
        for (int place = thread; place < LANES * PASSES; place += THREADS) {
            // Dealt out round-robin, so that every group has long and short lanes.
            int rank = place * lanes.groups + group;
            bool there = rank < lanes.count;
            int number = there ? (lanes.order ? lanes.order[rank] : rank) : 0;
            lane[place] = number;
            length[place] = there ? (lanes.lengths ? min(lanes.lengths[number], lanes.steps) : lanes.steps) : 0;
        }
    }
    // How many lanes of a pass reach a step: since they are sorted, these are the first ones.
    __device__ __forceinline__ int active(int pass, int step) const {
        int place = threadIdx.x & 31;
        return __popc(__ballot_sync(0xFFFFFFFFu, place < LANES && length[pass * LANES + place] > step));
    }
};

// Prefetches what a step reads from memory one step ahead, into the thread's own slot, and only after its polling: a multiprocessor's
// loads return in the order in which they were issued, so polls would wait behind slower loads issued before them.
struct Slot {
    u32 address;
    __device__ __forceinline__ void fetch_8(int at, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address + at), "l"(from) : "memory"); }
    __device__ __forceinline__ void fetch_4(int at, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address + at), "l"(from) : "memory"); }
    __device__ __forceinline__ void fetch_16(int at, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address + at), "l"(from) : "memory"); }
    __device__ __forceinline__ void close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    // Every pass commits one group per step, so the groups of the other passes may still be in flight.
    __device__ __forceinline__ uint4 read(bool owner) {
        uint4 v = make_uint4(0, 0, 0, 0);
        asm volatile("cp.async.wait_group %0;" ::"n"(PASSES - 1) : "memory");
        if (owner) asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
        return v;
    }
};
