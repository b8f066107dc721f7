// How a block deals with its lanes, and how it reads and writes what other blocks write and read, through memory and in clusters. Part of
// persistent.cu, joined.cu, wide.cu and stream.cu, whose constants it uses.

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
__device__ __forceinline__ void store_pieces(void* address, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint4 load_smem(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ void store_smem(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void copy_pieces(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// wgmma: the instruction for n lanes (wide.cu: n sums of a lane), 16 of a thread's sums, and operands in shared memory.
#if FP16
#define MMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 "
#else
#define MMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 "
#endif
#define D16(d, n)                                                                                                                       \
    "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3]), "+f"(d[n + 4]), "+f"(d[n + 5]), "+f"(d[n + 6]), "+f"(d[n + 7]),          \
        "+f"(d[n + 8]), "+f"(d[n + 9]), "+f"(d[n + 10]), "+f"(d[n + 11]), "+f"(d[n + 12]), "+f"(d[n + 13]), "+f"(d[n + 14]), "+f"(d[n + 15])
__device__ __forceinline__ u64 descriptor(u32 address) {  // K-major, 128-byte swizzle, 8 rows every 1024 bytes
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ u64 plain_descriptor(u32 address) {  // no swizzle: 8 rows x 16 bytes together, the next 8 of K after all lanes
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)LANES << 16) | (8ull << 32);
}

// A descriptor further on by so many bytes, computed when it is needed: ahead of time, all of them would not fit into registers.
__device__ __forceinline__ u64 further(u64 from, int bytes) {
    u32 low = (u32)from + (bytes >> 4);
    asm volatile("" : "+r"(low));
    return (from & 0xFFFFFFFF00000000ull) | low;
}

// Bounds a wait: if it takes seconds, a block is missing, and the launch is aborted with an error.
struct Patience {
    int left;
    __device__ __forceinline__ void spend() {
        if (--left < 0) asm volatile("trap;");
    }
};
#define PATIENCE 20000000

// Waits before the first poll, for this many clock cycles. Polling too early only delays the memory traffic that it waits for.
__device__ __forceinline__ void pause_for(u32 cycles) {
    u32 now = clock();
    while ((u32)clock() - now < cycles) continue;
}

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
        int count = 0;
#pragma unroll
        for (int first = 0; first < LANES; first += 32) {
            int place = first + (threadIdx.x & 31);
            count += __popc(__ballot_sync(0xFFFFFFFFu, place < LANES && length[pass * LANES + place] > step));
        }
        return count;
    }
};

#ifndef PENDING
#define PENDING (PASSES - 1)  // copies for later passes that may be under way when a pass reads its own
#endif
// Prefetches what a step reads from memory one step ahead, into the thread's own slot, and only after its polling: a multiprocessor's
// loads return in the order in which they were issued, so polls would wait behind slower loads issued before them.
struct Slot {
    u32 address;
    __device__ __forceinline__ void fetch_8(int at, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address + at), "l"(from) : "memory"); }
    __device__ __forceinline__ void fetch_4(int at, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address + at), "l"(from) : "memory"); }
    __device__ __forceinline__ void fetch_16(int at, const void* from) { copy_pieces(address + at, from); }
    __device__ __forceinline__ void close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    // Every pass commits one group per step, so the groups of the other passes may still be in flight.
    __device__ __forceinline__ void await() const { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
    __device__ __forceinline__ uint4 read(bool owner) {
        uint4 v = make_uint4(0, 0, 0, 0);
        await();
        if (owner) v = load_smem(address);
        return v;
    }
};

// Blocks of a cluster: addresses in each other's shared memory.
__device__ __forceinline__ u32 in_block(u32 address, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void cluster_barrier() {
#if CLUSTER
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A barrier in shared memory that counts the bytes arriving at this block: thread 0 sets the expected number, and all threads wait for them.
struct Arrival {
    u32 address;

    __device__ __forceinline__ void begin() const {
        if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ __forceinline__ void wait(int lap, u32 bytes) const {
        if (threadIdx.x == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
        Patience patience = {PATIENCE};
        u32 there = 0;
        while (!there) {
            asm volatile(
                "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                : "=r"(there)
                : "r"(address), "r"(lap & 1)
                : "memory");
            patience.spend();
        }
    }
};
