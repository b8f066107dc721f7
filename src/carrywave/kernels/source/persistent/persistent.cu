// One recurrent layer over a whole sequence in one launch, forward and backward, for Hopper (sm_90a).
//
// A recurrent step is bound by latency, so the weights never move: each block keeps its rows of the recurrent matrix in
// registers (and, for wide layers, in shared memory) for the whole sequence, and only h (backward: the gate gradients) travels
// between blocks, through L2. There are no flags and no barriers between blocks: the data itself shows whether it has arrived.
// Before the launch, the buffer is filled with a NaN that no conversion ever produces (all bits set); every 32-bit word of it is
// written once, and a reader polls each word it needs until it holds something else. Each word is read and checked by itself, so
// no memory ordering between words is needed.
//
// HEADS are independent of each other, each with HIDDEN units and a recurrent matrix of its own. Lanes are dealt to groups of blocks,
// which are independent of each other too. Within a group every block owns U units (16 or 32):
//   forward    gates[4U, N] = W[4U rows = U units x 4 gates, K = H] h[K, N]
//   backward   the four blocks of a quad own 4U units together. Each handles a quarter of K = 4H for all of them, and they exchange
//              the partial sums (float32) through a small ring.
// Blocks exchange data through L2 or, if they fit on the chip as clusters, from shared memory to shared memory.
// Either way a block multiplies [4U, H] by [H, N]: its warpgroups split K and use wgmma with the weights as operand A and the other
// operand in shared memory (128-byte swizzle); partial sums go through shared memory, to one thread for each unit and lane.
//
// Layouts: gates are interleaved, (unit, gate) with the gate fastest; H is padded to a multiple of 64 with zero weights. The step is
// the slowest dimension: h[T + 1, B, H] with the initial one first, gates[T, B, H, 4], and the cell's memory[T, B, H] in float32.
//
// Compile-time constants, set by the host: FP16, KBLOCKS (H / 64), KREG (64-wide blocks of K per warpgroup that stay in
// registers), UNITS (U), LANES (N, of one pass: 8, 16, 24 or 32, at most 512 / U), PASSES (a group has LANES * PASSES lanes),
// SUM_BUFFERS (1 or 2), CLUSTER (0; 4: the quads of backward; or a whole group, which is NEAR), CELL (see cell.cuh), RESETS (1: lanes start
// again at some steps, from zeros; 2: from a memory that is given, with what h adds to the gates already among their inputs), NOISE (1: see
// cell.cuh), HEADS (above 1 only if NEAR).

#include "half.cuh"

#define WARPGROUPS 4
#define THREADS (128 * WARPGROUPS)
#define HIDDEN (KBLOCKS * 64)
#define BLOCKS_OF_GROUP (HIDDEN / UNITS)
#define TILES (UNITS / 16)                // of 64 rows each
#define KPW ((KBLOCKS + WARPGROUPS - 1) / WARPGROUPS)  // 64-wide blocks of K per warpgroup
#define KSHARED (KPW - KREG)             // those of them in shared memory
#define CHUNKS (KPW * 8 * LANES)         // 16-byte pieces that a warpgroup gathers in a pass
#define PIECES ((CHUNKS + 127) / 128)    // per thread
#define ROW_PITCH (LANES + (KPW > 6 ? 2 : 4))  // of the partial sums: no bank conflicts, or only a few where shared memory is short
#define RED_FLOATS (64 * TILES * ROW_PITCH)
#define B_BYTES (WARPGROUPS * KPW * LANES * 128)
#define A_BYTES (WARPGROUPS * KSHARED * TILES * 8192)
#define RED_BYTES (SUM_BUFFERS * WARPGROUPS * RED_FLOATS * 4)
#define PREPARED (PASSES == 1 && KPW < 6)  // addresses are kept if there are registers for them
#define OWNERS (UNITS * LANES)            // threads that own a unit of a lane
#define NEAR (CLUSTER == BLOCKS_OF_GROUP) // a whole group is one cluster
#define B_ALL (NEAR ? 2 * B_BYTES : B_BYTES)
#define SLOT_BYTES (PASSES * OWNERS * SLOT)
#define WIDTH (HEADS * HIDDEN)
#define TABLE_BYTES (2 * LANES * PASSES * 4)
#if CLUSTER
#define RING 2  // a block writes a slot again only after it has received the other's next sum
#define CLUSTERED __cluster_dims__(CLUSTER)
#define RING_BYTES (RING * 4 * OWNERS * 4)
#define RING_END (RING_BYTES + RING * 8)
#else
#define RING 4
#define CLUSTERED
#define RING_BYTES 0
#define RING_END 0
#endif
// With RESETS, their words come last.
#define RESETS_AT (B_ALL + A_BYTES + RED_BYTES + SLOT_BYTES + TABLE_BYTES + RING_END + (NEAR ? 2 * STAGE_BYTES + 16 : 0))
#define STAGE_BYTES (OWNERS * 8)           // what a block sends to the others: in backward, four numbers per owner

#include "persistent/passes.cuh"
#include "cell.cuh"
#include "lanes.cuh"
#include "product.cuh"
#include "gather.cuh"
#include "cluster.cuh"

#define SETUP                                                                                                                       \
    extern __shared__ __align__(1024) unsigned char memory[];                                                                       \
    Lanes lanes = {order, lengths, count, groups, steps};                                                                           \
    u32 tiles = shared_address(memory);                                                                                             \
    float* partial = (float*)(memory + B_ALL + A_BYTES);                                                                            \
    int* places = (int*)(memory + B_ALL + A_BYTES + RED_BYTES + SLOT_BYTES);                                                        \
    Table table = {places, places + LANES * PASSES};                                                                                \
    int thread = threadIdx.x, warpgroup = thread >> 7, warp = (thread >> 5) & 3, lane = thread & 31;                                \
    int group = blockIdx.x / BLOCKS_OF_GROUP, member = blockIdx.x % BLOCKS_OF_GROUP, head = HEADS == 1 ? 0 : group % HEADS;         \
    group = HEADS == 1 ? group : group / HEADS;                                                                                     \
    for (int n = thread * 16; n < B_ALL; n += THREADS * 16)   *(uint4*)(memory + n) = make_uint4(0, 0, 0, 0);                       \
    table.fill(lanes, group, thread);                                                                                               \
    /* One thread per unit and lane: a warp covers eight units of four lanes. */                                                    \
    int owned = OWNED, unit = (owned & 7) + (owned / (8 * LANES)) * 8, place = (owned >> 3) % LANES;                                \
    bool owning = thread < (HALVES ? 2 : 1) * OWNERS; /* in some pass */                                                            \
    auto owns = [&](int pass) { return HALVES ? thread / OWNERS == (pass & 1) : owning; };                                          \
    Slot slot = {tiles + B_ALL + A_BYTES + RED_BYTES + (owning ? owned : 0) * SLOT};                                                \
    int column = head * HIDDEN + member * UNITS + unit, parity = 0;                                                                 \
    u64 step_h = (u64)lanes.count * WIDTH;                                                                                          \
    Gather<> gather;                                                                                                                  \
    u32 rest = tiles + B_ALL + A_BYTES + RED_BYTES + SLOT_BYTES + TABLE_BYTES + RING_END;                                           \
    Near near = {tiles, rest};                                                                                                      \
    near.begin();                                                                                                                   \
    Weights own;

#if NEAR
#define CLUSTERED_FORWARD CLUSTERED
#else
#define CLUSTERED_FORWARD
#endif
extern "C" __global__ void CLUSTERED_FORWARD __launch_bounds__(THREADS, 1) forward(
    const u16* __restrict__ weights,  // [4H interleaved, H]
    u16* hs,                          // [T + 1, B, H]: the initial h is given, the others hold WORD_EMPTY
    u16* gates,                       // [T, B, H, 4]: the input product; replaced by what backward needs if `keep`
    Memory* memories,                 // [T, B, H]
    const Memory* first_memory,       // [B, H]
    Memory* last_memory,              // [B, H]
    const int* order, const int* lengths, int count, int groups, int steps, int keep,
    const u32* reset_bits, int reset_words, int reset_first,
    const Memory* reset_memory,       // [H] if RESETS is 2
    const unsigned char* noise_bytes, float noise_scale, float old_h, float old_memory) {
    SETUP
    Resets resets = {reset_bits, reset_words, reset_first, (u32*)(memory + RESETS_AT)};
    Noise noise = {noise_bytes, noise_scale, old_h, old_memory};
    {
        // A tile has 16 units, and each warp handles one of their gates.
        const u16* row0 = weights + (u64)((head * HIDDEN + member * UNITS + (lane >> 2)) * 4 + warp) * HIDDEN;
        own.load(row0, (u64)8 * 4 * HIDDEN, (u64)16 * 4 * HIDDEN, tiles + B_ALL, warpgroup, warp, lane);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (NEAR) cluster_barrier();

    Memory c[KEPT];
    float h_before[KEPT];
    u32 noise_byte[KEPT];
    Memory begin = RESETS == 2 && owning ? reset_memory[column] : nothing();
    int active[ROLLED ? 1 : PASSES];
    auto fetch = [&](int step, int pass, u32& noise_byte) {
        int at = pass * LANES + place;
        Slot to = {slot.address + pass * OWNERS * SLOT};
        if (owns(pass) && table.length[at] > step) to.fetch_8(0, gates + (step * step_h + (u64)table.lane[at] * WIDTH + column) * 4);
        if (NOISE && owns(pass) && table.length[at] > step) noise_byte = noise.fetch(step * step_h + (u64)table.lane[at] * WIDTH + column);
        to.close();
    };
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = pass * LANES + place;
        bool there = owning && group + at * lanes.groups < lanes.count;
        u64 cell = (u64)table.lane[at] * WIDTH + column;
        if (!HALVES || owns(pass)) {
            c[OWN_PLACE(pass)] = there ? first_memory[cell] : nothing();
            if (NOISE) h_before[OWN_PLACE(pass)] = there ? half_at(hs, cell) : 0.0f;
        }
        if (!ROLLED) active[IN_TURN(pass)] = table.active(pass, 0);
        fetch(0, pass, noise_byte[OWN_PLACE(pass)]);
    }
    if (PREPARED) gather.prepare(table.lane, WIDTH, near.tiles_of(1), warpgroup, thread & 127);
    int longest = table.length[0];
    for (int step = 0; step < longest; step++) {
        if (RESETS) resets.keep(table.lane, step);
#pragma unroll AT_A_TIME
        for (int pass = 0; pass < PASSES; turn(owns(pass), c, h_before, noise_byte), pass++) {
            const int now = IN_TURN(pass);
            bool owner = owns(pass);
            auto fetch_last = [&]() {  // for the pass before this one, which was this thread's
                if (HALVES && !owner && step + pass > 0) fetch(step + (pass > 0), (pass + PASSES - 1) % PASSES, noise_byte[KEPT - 1]);
            };
            if (ROLLED) active[0] = table.active(pass, step);
            if (active[now] == 0) {
                fetch_last();
                slot.close();
                continue;
            }
            int at = pass * LANES + place;
            u64 cell = (u64)step * step_h + (u64)table.lane[at] * WIDTH + column;
            bool real = owner && table.length[at] > step;
            if (!PREPARED) gather.prepare(table.lane + pass * LANES, WIDTH, tiles, warpgroup, thread & 127);
            if (NEAR && step > 0) near.receive(step - 1);
            else gather.run(hs + step * step_h + head * HIDDEN, active[now], step > 0, FORWARD_PAUSE, warpgroup);
            uint4 input = Slot{slot.address + pass * OWNERS * SLOT}.read(owner);
            u32 noisy = NOISE ? noise_byte[now] : 0;
            if (!HALVES) fetch(step + 1, pass, noise_byte[now]);
            own.multiply(near.tiles_of(step - 1), SUMS, warpgroup, warp, lane);
            __syncthreads();
            float a[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            bool again = RESETS && real && resets.at(at, step);
            if (owner) {
                unpack(input.x, a[0], a[1]);
                unpack(input.y, a[2], a[3]);
                int row = unit / 16 * 64 + unit % 16;
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    float sum = total(SUMS, row + 16 * n, place);
                    a[n] += RESETS ? chosen(again, 0.0f, sum) : sum;
                }
            }
            done();
            parity ^= 1;
            if (owner) {
                float h = 0.0f;
                if (RESETS) c[now] = chosen(again, begin, c[now]), h_before[now] = NOISE ? chosen(again, 0.0f, h_before[now]) : 0.0f;
                if (real) h = cell_forward(a, c[now], NOISE ? h_before[now] : 0.0f, noise.of(noisy));
                float beside = __shfl_xor_sync(0xFFFFFFFFu, h, 1);
                u32 both = (unit & 1) ? pack(beside, h) : pack(h, beside);
                if (NOISE) h_before[now] = half_of(both, unit & 1);  // as all blocks see it
                if (real) {
                    if (!(unit & 1)) {
                        if (NEAR) *(u32*)__cvta_shared_to_generic(near.place_of(step, unit, place)) = both;
                        store_word(hs + cell + step_h, both);
                    }
                    if (keep) {
                        *(uint2*)(gates + cell * 4) = make_uint2(pack(a[0], a[1]), pack(a[2], a[3]));
                        memories[cell] = RESETS ? noted(c[now], again) : c[now];
                    }
                }
            }
            fetch_last();
            if (NEAR && step + 1 < longest) near.send(step, member * UNITS, UNITS * LANES * 2, 0, 1, CLUSTER);
            if (!ROLLED) active[now] = table.active(pass, step + 1);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = pass * LANES + place;
        if (owns(pass) && group + at * lanes.groups < lanes.count) {
            u64 cell = (u64)table.lane[at] * WIDTH + column;
            last_memory[cell] = c[OWN_PLACE(pass)];
            // No block waits for these: a lane that has ended is no longer gathered.
            for (int step = table.length[at]; step < lanes.steps; step++) hs[(u64)(step + 1) * step_h + cell] = 0;
        }
    }
    if (NEAR) cluster_barrier();  // no block may exit while others may still send to it
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) backward(
    const u16* __restrict__ weights,  // [H, 4H interleaved]: the recurrent matrix, transposed
    const u16* gates,                 // [T, B, H, 4]
    const Memory* memories,           // [T, B, H]
    const Memory* first_memory,       // [B, H]
    const u16* grad_y,                // [T, B, H]
    const float* grad_last_h,         // [B, H] or null
    const Memory* grad_last_memory,   // [B, H] or null
    u16* grads,                       // [T, B, H, 4], holding WORD_EMPTY: the pre-activation gradients
    float* grad_first_h,              // [B, H]
    Memory* grad_first_memory,        // [B, H]
    float* grad_bias,                 // [groups, H, 4]
    u32* ring,                        // [RING, blocks, 4, OWNERS], zeroed; unused in clusters
    const int* order, const int* lengths, int count, int groups, int steps,
    int after,                        // `grads` continues behind this launch's steps, with a later launch's gradients: the recurrence goes on from there
    int before,                       // an earlier launch goes on from here: the gradient of the initial h is left to it (not if NEAR)
    const u32* reset_bits, int reset_words, int reset_first, const Memory* reset_memory,
    float* grad_reset,                // [groups, H, 2] if RESETS is 2: the gradients of what resets put into memory and h, but for the product
    const unsigned char* noise_bytes, float noise_scale, float old_h, float old_memory) {
    SETUP
    Resets resets = {reset_bits, reset_words, reset_first, (u32*)(memory + RESETS_AT)};
    Noise noise = {noise_bytes, noise_scale, old_h, old_memory};
    int quad = member >> 2, part = member & 3;
    {
        const u16* row0 = weights + (u64)head * HIDDEN * 4 * HIDDEN + (u64)(quad * 4 * UNITS + warp * 16 + (lane >> 2)) * 4 * HIDDEN + part * HIDDEN;
        own.load(row0, (u64)8 * 4 * HIDDEN, (u64)64 * 4 * HIDDEN, tiles + B_ALL, warpgroup, warp, lane);
    }
    Swap swap = {ring, tiles + B_ALL + A_BYTES + RED_BYTES + SLOT_BYTES + TABLE_BYTES, part};
    swap.begin();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    cluster_barrier();

    Memory dc[KEPT], c_now[KEPT];
    float past[KEPT], bias[4] = {0.0f, 0.0f, 0.0f, 0.0f}, of_reset[2] = {0.0f, 0.0f};
    u32 noise_byte[KEPT];
    bool cut[KEPT];  // the next step starts again
    Memory begin = RESETS == 2 && owning ? reset_memory[column] : nothing();
    int active[ROLLED ? 1 : PASSES];  // lanes that reach step + 1
    int longest = table.length[0], swaps = 0;
    auto fetch = [&](int step, int pass, u32& noise_byte) {
        int at = pass * LANES + place;
        Slot to = {slot.address + pass * OWNERS * SLOT};
        if (owns(pass) && step >= 0 && table.length[at] > step) {
            u64 lane_cell = (u64)table.lane[at] * WIDTH + column, cell = step * step_h + lane_cell;
            to.fetch_8(0, gates + cell * 4);
            const Memory* before = step > 0 ? memories + (cell - step_h) : first_memory + lane_cell;
            if (SLOT == 16) to.fetch_4(8, before);
            else to.fetch_16(16, before);
            if (NOISE) noise_byte = noise.fetch(cell);
            to.fetch_4(12, grad_y + (cell & ~1ull));  // together with its neighbour's
        }
        to.close();
    };
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = pass * LANES + place;
        bool there = owns(pass) && group + at * lanes.groups < lanes.count;
        u64 cell = (u64)table.lane[at] * WIDTH + column;
        if (!HALVES || owns(pass)) {
            dc[OWN_PLACE(pass)] = there && grad_last_memory ? grad_last_memory[cell] : nothing();
            c_now[OWN_PLACE(pass)] = (CELL != GRU || RESETS) && there && table.length[at] > 0 ? memories[(u64)(table.length[at] - 1) * step_h + cell] : nothing();
            past[OWN_PLACE(pass)] = 0.0f;
            if (RESETS) cut[OWN_PLACE(pass)] = there && after && resets.in(resets.word(table.lane[at], longest), longest);
        }
        if (!ROLLED) active[IN_TURN(pass)] = after && longest == lanes.steps ? table.active(pass, longest - 1) : 0;
        if (there)  // padded steps have zero gradients
            for (int step = table.length[at]; step < lanes.steps; step++) *(uint2*)(grads + ((u64)step * step_h + cell) * 4) = make_uint2(0, 0);
        fetch(longest - 1, pass, noise_byte[OWN_PLACE(pass)]);
    }
    if (PREPARED) gather.prepare(table.lane, 4 * WIDTH, tiles, warpgroup, thread & 127);
    // Step -1 computes the gradient of the initial h.
    for (int step = longest - 1; step >= (before ? 0 : -1); step--) {
#pragma unroll AT_A_TIME
        for (int pass = 0; pass < PASSES; turn(owns(pass), dc, c_now, past, noise_byte, cut), pass++) {
            const int now = IN_TURN(pass);
            bool owner = owns(pass);
            if (ROLLED) active[0] = step + 1 < longest ? table.active(pass, step + 1) : after && longest == lanes.steps ? table.active(pass, step) : 0;
            int at = pass * LANES + place, length = owner ? table.length[at] : 0;
            u64 cell = (u64)table.lane[at] * WIDTH + column;
            float recurrent = 0.0f, quarter[4] = {0.0f, 0.0f, 0.0f, 0.0f}, parts[4];
            if (active[now] > 0) {
                if (!PREPARED) gather.prepare(table.lane + pass * LANES, 4 * WIDTH, tiles, warpgroup, thread & 127);
                int turn = longest - 2 - step;
                if (NEAR) near.receive(turn);
                else gather.run(grads + (u64)(step + 1) * step_h * 4 + part * HIDDEN, active[now], true, BACKWARD_PAUSE, warpgroup);
                own.multiply(near.tiles_of(turn), SUMS, warpgroup, warp, lane);
                __syncthreads();
                if (owner) {
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        // Each block of the quad gets what it owns.
                        quarter[n] = total(SUMS, n * UNITS + unit, place);
                        if (n != part) swap.give(swaps, n, quarter[n]);
                    }
                }
                done();
                parity ^= 1;
            }
            if (HALVES && !owner) {
                swaps += active[0] > 0;
                if (pass > 0 || step < longest - 1) fetch(step - (pass > 0), (pass + PASSES - 1) % PASSES, noise_byte[KEPT - 1]);
                continue;
            }
            // While the others' sums travel: everything that does not need them.
            uint4 kept = Slot{slot.address + pass * OWNERS * SLOT}.read(owner);
            NoiseOf noisy = noise.of(NOISE ? noise_byte[now] : 0);
#if SLOT == 16
            Memory c_before = __uint_as_float(kept.z);
#else
            uint4 stored = Slot{slot.address + pass * OWNERS * SLOT + 16}.read(owner);
            Memory c_before = make_float4(__uint_as_float(stored.x), __uint_as_float(stored.y), __uint_as_float(stored.z), __uint_as_float(stored.w));
#endif
            float a[4];
            unpack(kept.x, a[0], a[1]);
            unpack(kept.y, a[2], a[3]);
            bool again = RESETS && step >= 0 && note_in(c_now[now]);
            Slopes slopes(a, RESETS ? chosen(again, begin, c_before) : c_before, c_now[now], noisy);
            slopes.hold();
            if (active[now] > 0) recurrent = swap.sum(swaps++, quarter, owner, parts);
            if (!HALVES) fetch(step - 1, pass, noise_byte[now]);
            // A lane that ended with the last step of this launch has no gradients behind it: they are zero there.
            bool follows = length > step + 1 || (length > step && step + 1 == lanes.steps && after);
            float dh = chosen(follows && !(RESETS && cut[now]), recurrent, 0.0f);
            if (NOISE && CELL != GRU) dh += past[now];
            if (RESETS) cut[now] = again && length > step;
            if (step >= 0 && length > step) {
                float low, high, d[4];
                unpack(kept.w, low, high);
                dh += (column & 1) ? high : low;
                if (step == length - 1 && grad_last_h) dh += grad_last_h[cell];
                slopes.apply(dh, d, dc[now], past[now]);
                u32 first = pack(d[0], d[1]), second = pack(d[2], d[3]);
                if (NEAR) *(uint2*)__cvta_shared_to_generic(near.place_of(longest - 1 - step, unit * 4, place)) = make_uint2(first, second);
                store_pair(grads + ((u64)step * step_h + cell) * 4, first, second);
                if (CELL != GRU || RESETS) c_now[now] = c_before;
#pragma unroll
                for (int n = 0; n < 4; n++) bias[n] += d[n];
#if RESETS == 2 && CELL != SLSTM
                if (cut[now]) of_reset[0] += dc[now], of_reset[1] += past[now];
#endif
                if (RESETS) dc[now] = chosen(cut[now], nothing(), dc[now]), past[now] = chosen(cut[now], 0.0f, past[now]);
            }
            // To the block of each quad that handles this quarter of K.
            if (NEAR && step >= 0) near.send(longest - 1 - step, member % (BLOCKS_OF_GROUP / 4) * UNITS * 4, UNITS * LANES * 8, member / (BLOCKS_OF_GROUP / 4), 4, BLOCKS_OF_GROUP / 4);
            if (step < 0 && length > 0) grad_first_h[cell] = dh;
            if (!ROLLED) active[now] = step < 0 ? 0 : table.active(pass, step);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int at = pass * LANES + place;
        u64 cell = (u64)table.lane[at] * WIDTH + column;
        if (owns(pass) && group + at * lanes.groups < lanes.count) {
            grad_first_memory[cell] = dc[OWN_PLACE(pass)];
            if (table.length[at] == 0) grad_first_h[cell] = grad_last_h ? grad_last_h[cell] : 0.0f;
            else if (before) grad_first_h[cell] = NOISE ? past[OWN_PLACE(pass)] : 0.0f;
        }
    }
    int at = (HALVES ? thread / OWNERS * OWNERS : 0) + unit * LANES + place;
    u64 first = (u64)group * WIDTH + head * HIDDEN + member * UNITS;
    sum_lanes<2>(partial, thread, owning, at, make_float4(bias[0], bias[1], bias[2], bias[3]), grad_bias, first);
#if RESETS == 2
    sum_lanes<1>(partial, thread, owning, at, make_float2(of_reset[0], of_reset[1]), grad_reset, first);
#endif
    if (NEAR) cluster_barrier();
}
