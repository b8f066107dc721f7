// How a block gets the data of other blocks for its product: polling. Part of persistent.cu and joined.cu, whose
// constants it uses.

// Copies this warpgroup's part of K, for the lanes of a pass, from global to shared memory, in pieces of 16 bytes.
//
// Piece n of a thread is number n * 128 + thread in the warpgroup's part, counted by block of K, then by row. Rows repeat after PERIOD
// pieces, SKIP blocks of K further on, so that few addresses are needed. Of the END blocks, STRIDE warpgroups take turns.
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

// Very wide layers leave few registers, which only some of the pieces pass through at once. With several passes the others are copied at the
// same time (from L2, as the polls are, and every word of them is checked); with one they would not be there yet, and are loaded afterwards.
#define AT_ONCE (KPW > 5 && PIECES > 4 ? (PIECES + 1) / 2 : PIECES)
#define COPIED (KPW > 5 && PIECES > 4 && PASSES > 1)

#define WHOLE(piece) (piece.x != WORD_EMPTY && piece.y != WORD_EMPTY && piece.z != WORD_EMPTY && piece.w != WORD_EMPTY)

template <int STRIDE = WARPGROUPS, int END = KBLOCKS>
struct Gather {
    u32 offset[PERIOD], target[PERIOD];
    int row[PERIOD];
    u32 there;  // bit mask of the pieces that exist

    __device__ __forceinline__ void prepare(const int* lane_of, int pitch, u32 tiles, int warpgroup, int thread) {
        int own = first_block<STRIDE>(warpgroup);
        there = 0;
#pragma unroll
        for (int n = 0; n < PERIOD; n++) {
            int id = n * 128 + thread, i = id / (8 * LANES);
            row[n] = (id % (8 * LANES)) / 8;
            offset[n] = (u32)lane_of[row[n]] * pitch + (own + STRIDE * i) * 64 + (id & 7) * 8;
            if (NEAR) target[n] = tiles + (warpgroup + WARPGROUPS * i) * LANES * 128 + (id & 7) * LANES * 16 + row[n] * 16;
            else target[n] = tiles + (warpgroup * KPW + i) * LANES * 128 + row[n] * 128 + (((id & 7) ^ (row[n] & 7)) << 4);
        }
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            int id = n * 128 + thread;
            there |= id < CHUNKS && own + STRIDE * (id / (8 * LANES)) < END ? 1u << n : 0;
        }
    }

    // `published`: other blocks write the data during this launch, so it may not be there yet.
    // `pause`: clock cycles before the first poll.
    __device__ __forceinline__ void run(const u16* from, int active, bool published, int pause, int warpgroup) const {
        u32 missing = there;
        if (active < LANES) {
#pragma unroll
            for (int n = 0; n < PIECES; n++) missing &= row[n % PERIOD] < active ? ~0u : ~(1u << n);
        }
        if (pause > 0 && published) pause_for(pause);
#if COPIED
#pragma unroll
        for (int n = AT_ONCE; n < PIECES; n++)
            if (missing >> n & 1) copy_pieces(target[n % PERIOD] + (n / PERIOD) * SKIP * LANES * 128, from + offset[n % PERIOD] + (n / PERIOD) * SKIP * STRIDE * 64);
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
        Patience patience = {PATIENCE};
#pragma unroll
        for (int first = 0; first < PIECES; first += AT_ONCE) {
            uint4 piece[AT_ONCE];
            u32 asked = AT_ONCE < PIECES ? missing >> first & ((1u << AT_ONCE) - 1) : missing;
#if COPIED
            if (first > 0) {
                asm volatile("cp.async.wait_group 0;" ::: "memory");
#pragma unroll
                for (int n = 0; n < PIECES - AT_ONCE; n++) piece[n] = load_smem(target[(first + n) % PERIOD] + ((first + n) / PERIOD) * SKIP * LANES * 128);
#pragma unroll
                for (int n = 0; n < PIECES - AT_ONCE; n++)
                    if (WHOLE(piece[n]) || !published) asked &= ~(1u << n);
            }
#endif
            while (__any_sync(0xFFFFFFFFu, asked)) {
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++)
                    if (asked >> n & 1) piece[n] = load_pieces(from + offset[(first + n) % PERIOD] + ((first + n) / PERIOD) * SKIP * STRIDE * 64);
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++) {
                    bool whole = WHOLE(piece[n]);
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
