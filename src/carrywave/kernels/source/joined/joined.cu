// The layers of a stack in one launch, all at the same time, for Hopper (sm_90a): few lanes leave a layer most of the chip idle.
//
// Each layer runs as in persistent.cu, with one pass, on blocks of its own. What the layer below has computed reaches it as its own h does,
// through L2, marked as not yet written until it is there. So a layer follows the one below by a step, and T + L - 1 steps replace T x L. A
// block's product has twice the K:
//   forward    gates[4U, N] = [W_hh, W_ih][4U, 2H] [own h; outputs of the layer below][2H, N]
//   backward   the first two blocks of a quad handle half each of K = 4H of the layer's own gate gradients of the next step, the other two
//              half each of those of the layer above at the same step. The latter sum is the gradient of the layer's outputs, apart from
//              the mask, and the owner of a unit adds the two.
// The lowest layer finds the input product in its gates, and the gradient of the highest layer's outputs is given; there, the other half of
// K is left out. Outputs that are multiplied by a mask (dropout) are also written as such, for the layer above.
//
// Compile-time constants, set by the host: LAYERS, and those of persistent.cu, with KREG for the whole of K.

#include "half.cuh"

#define WARPGROUPS 4
#define THREADS (128 * WARPGROUPS)
#define HIDDEN (KBLOCKS * 64)
#define BLOCKS_OF_GROUP (HIDDEN / UNITS)
#define TILES (UNITS / 16)
#define KPW ((KBLOCKS + 1) / 2)  // the same: 2 * KBLOCKS
#define KSHARED (KPW - KREG)
#define CHUNKS (KPW * 8 * LANES)
#define PIECES ((CHUNKS + 127) / 128)
#define ROW_PITCH (LANES + (KPW > 6 ? 2 : 4))
#define RED_FLOATS (64 * TILES * ROW_PITCH)
#define B_BYTES (WARPGROUPS * KPW * LANES * 128)
#define A_BYTES (WARPGROUPS * KSHARED * TILES * 8192)
#define RED_BYTES (SUM_BUFFERS * WARPGROUPS * RED_FLOATS * 4)
#define PREPARED (KPW < 6)
#define OWNERS (UNITS * LANES)
#define OWNED threadIdx.x
#define NEAR 0
#define STAGE_BYTES 0
#define SLOT_BYTES (OWNERS * SLOT)
#define TABLE_BYTES (2 * LANES * 4)
#if CLUSTER
#define RING 2
#define CLUSTERED __cluster_dims__(CLUSTER)
#define RING_BYTES (RING * 4 * OWNERS * 4)
#else
#define RING 4
#define CLUSTERED
#define RING_BYTES 0
#endif
// Clock cycles before the first poll, as measured on an H200. Shorter than in persistent.cu: what comes from below is mostly there already.
#define FORWARD_PAUSE 200
#define BACKWARD_PAUSE (CLUSTER ? 150 : 300)

#include "cell.cuh"
#include "lanes.cuh"
#include "product.cuh"
#include "gather.cuh"
#include "cluster.cuh"

// The arguments of each layer. Shapes as in persistent.cu.
struct Forward {
    const u16* w_hh;           // [4H interleaved, H]
    const u16* w_ih;           // the same; null in the lowest layer
    const u16* bias;           // [H, 4]
    const u16* below;          // [T, B, H]: the outputs of the layer below
    u16* hs;                   // [T + 1, B, H]
    u16* outputs;              // [T, B, H]: h times the mask, holding WORD_EMPTY; null without a mask
    const u16* mask;           // [T or 1, B, H]
    u16* gates;                // [T, B, H, 4]: in the lowest layer the input product
    Memory* memories;          // [T, B, H]
    const Memory* first_memory;
    Memory* last_memory;
};
struct Backward {
    const u16* turned_hh;      // [H, 4H interleaved]
    const u16* turned_ih;      // of the layer above; null in the highest
    const u16* above;          // its gate gradients
    const u16* gates;
    const Memory* memories;
    const Memory* first_memory;
    const u16* from_y;         // [T or 1, B, H]: the gradient of the outputs in the highest layer, elsewhere the mask, or null
    const float* grad_last_h;  // [B, H] or null
    const Memory* grad_last_memory;
    u16* grads;                // [T, B, H, 4], holding WORD_EMPTY
    float* grad_first_h;
    Memory* grad_first_memory;
    float* grad_bias;          // [groups, H, 4]
};
template <typename Arguments>
struct Layers {
    Arguments of[LAYERS];
};
// The number of a layer, opaque to the compiler: so that it reads a layer's arguments where they are used instead of keeping them in registers.
__device__ __forceinline__ int again(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

#define SETUP                                                                                                                       \
    extern __shared__ __align__(1024) unsigned char memory[];                                                                       \
    Lanes lanes = {order, lengths, count, groups, steps};                                                                           \
    u32 tiles = shared_address(memory);                                                                                             \
    float* partial = (float*)(memory + B_BYTES + A_BYTES);                                                                          \
    int* places = (int*)(memory + B_BYTES + A_BYTES + RED_BYTES + SLOT_BYTES);                                                      \
    Table table = {places, places + LANES};                                                                                         \
    int thread = threadIdx.x, warpgroup = thread >> 7, warp = (thread >> 5) & 3, lane = thread & 31;                                \
    int number = blockIdx.x / (groups * BLOCKS_OF_GROUP), block = blockIdx.x % (groups * BLOCKS_OF_GROUP);                          \
    int group = block / BLOCKS_OF_GROUP, member = block % BLOCKS_OF_GROUP;                                                          \
    for (int n = thread * 16; n < B_BYTES; n += THREADS * 16) *(uint4*)(memory + n) = make_uint4(0, 0, 0, 0);                       \
    table.fill(lanes, group, thread);                                                                                               \
    int unit = (thread & 7) + (thread / (8 * LANES)) * 8, place = (thread >> 3) % LANES;                                            \
    bool owner = thread < OWNERS;                                                                                                   \
    Slot slot = {tiles + B_BYTES + A_BYTES + RED_BYTES + (owner ? thread : 0) * SLOT};                                              \
    int column = member * UNITS + unit, parity = 0;                                                                                 \
    u64 step_h = (u64)lanes.count * HIDDEN;                                                                                         \
    Weights own;

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const __grid_constant__ Layers<Forward> layers, const int* order, const int* lengths, int count, int groups, int steps, int keep,
    int mask_steps) {  // 0: masks are the same at all steps
    SETUP
    const Forward& layer = layers.of[number];
    // The first two warpgroups multiply h, the others what comes from below.
    bool fed = layer.below != nullptr;
    {
        const u16* row0 = (warpgroup < 2 ? layer.w_hh : layer.w_ih) + (u64)((member * UNITS + (lane >> 2)) * 4 + warp) * HIDDEN;
        own.load<2, KBLOCKS>(row0, (u64)8 * 4 * HIDDEN, (u64)16 * 4 * HIDDEN, tiles + B_BYTES, warpgroup, warp, lane, warpgroup < 2 || fed);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    int number_of_lane = table.lane[place], length = owner ? table.length[place] : 0;
    bool there = owner && group + place * lanes.groups < lanes.count;
    u64 lane_cell = (u64)number_of_lane * HIDDEN + column;
    Memory c = there ? layer.first_memory[lane_cell] : nothing();
    uint2 bias = fed && owner ? *(const uint2*)(layer.bias + column * 4) : make_uint2(0, 0);
    auto fetch = [&](int step) {
        const Forward& layer = layers.of[again(number)];
        if (length > step) {
            if (!fed) slot.fetch_8(0, layer.gates + (step * step_h + lane_cell) * 4);
            if (layer.mask) slot.fetch_4(8, layer.mask + (step * mask_steps * step_h + (lane_cell & ~1ull)));  // together with its neighbour's
        }
        slot.close();
    };
    int active = table.active(0, 0);
    fetch(0);
    Gather<2, KBLOCKS> gather;
    if (PREPARED) gather.prepare(table.lane, HIDDEN, tiles, warpgroup, thread & 127);
    int longest = table.length[0];
    for (int step = 0; step < longest; step++) {
        u64 cell = (u64)step * step_h + lane_cell;
        bool real = length > step;
        if (!PREPARED) gather.prepare(table.lane, HIDDEN, tiles, warpgroup, thread & 127);
        bool gathers = warpgroup < 2 || fed;
        const Forward& at = layers.of[again(number)];
        gather.run((warpgroup < 2 ? at.hs : at.below) + step * step_h, gathers ? active : 0, gathers && (step > 0 || warpgroup >= 2), FORWARD_PAUSE, warpgroup);
        uint4 input = slot.read(owner);
        fetch(step + 1);
        own.multiply(tiles, SUMS, warpgroup, warp, lane);
        __syncthreads();
        float a[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (owner) {
            unpack(fed ? bias.x : input.x, a[0], a[1]);
            unpack(fed ? bias.y : input.y, a[2], a[3]);
            int row = unit / 16 * 64 + unit % 16;
#pragma unroll
            for (int n = 0; n < 4; n++) a[n] += total(SUMS, row + 16 * n, place);
        }
        done();
        parity ^= 1;
        if (owner) {
            const Forward& layer = layers.of[again(number)];
            float h = 0.0f;
            if (real) h = cell_forward(a, c, 0.0f, Noise{nullptr, 1.0f, 0.0f, 0.0f}.of(0));
            float beside = __shfl_xor_sync(0xFFFFFFFFu, h, 1);
            if (real) {
                if (!(unit & 1)) {
                    u32 both = pack(h, beside);
                    store_word(layer.hs + cell + step_h, both);
                    if (layer.outputs) {
                        float low, high, by_low, by_high;
                        unpack(both, low, high);
                        unpack(input.z, by_low, by_high);
                        store_word(layer.outputs + cell, pack(low * by_low, high * by_high));
                    }
                }
                if (keep) {
                    *(uint2*)(layer.gates + cell * 4) = make_uint2(pack(a[0], a[1]), pack(a[2], a[3]));
                    layer.memories[cell] = c;
                }
            }
        }
        active = table.active(0, step + 1);
    }
    if (there) {
        layer.last_memory[lane_cell] = c;
        // No block waits for these: a lane that has ended is no longer gathered.
        for (int step = table.length[place]; step < lanes.steps; step++) {
            layer.hs[(u64)(step + 1) * step_h + lane_cell] = 0;
            if (layer.outputs) layer.outputs[(u64)step * step_h + lane_cell] = 0;
        }
    }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) backward(
    const __grid_constant__ Layers<Backward> layers,
    u32* ring,  // [RING, blocks of all layers, 4, OWNERS], zeroed; unused in clusters
    const int* order, const int* lengths, int count, int groups, int steps,
    int after, int before,  // as in persistent.cu
    int mask_steps) {
    SETUP
    const Backward& layer = layers.of[number];
    int quad = member >> 2, part = member & 3;
    bool highest = layer.above == nullptr, gathers = part < 2 || !highest;
    bool masked = layer.from_y && !highest;
    mask_steps |= highest;
    {
        const u16* row0 = (part < 2 ? layer.turned_hh : layer.turned_ih) + (u64)(quad * 4 * UNITS + warp * 16 + (lane >> 2)) * 4 * HIDDEN + (part & 1) * 2 * HIDDEN;
        own.load<WARPGROUPS, 2 * KBLOCKS>(row0, (u64)8 * 4 * HIDDEN, (u64)64 * 4 * HIDDEN, tiles + B_BYTES, warpgroup, warp, lane, gathers);
    }
    Swap swap = {ring, tiles + B_BYTES + A_BYTES + RED_BYTES + SLOT_BYTES + TABLE_BYTES, part};
    swap.begin();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    cluster_barrier();

    int length = owner ? table.length[place] : 0, longest = table.length[0], turn = 0;
    bool there = owner && group + place * lanes.groups < lanes.count;
    u64 lane_cell = (u64)table.lane[place] * HIDDEN + column;
    Memory dc = there && layer.grad_last_memory ? layer.grad_last_memory[lane_cell] : nothing();
    Memory c_now = CELL != GRU && there && length > 0 ? layer.memories[(u64)(length - 1) * step_h + lane_cell] : nothing();
    float past = 0.0f, bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    auto fetch = [&](int step) {
        const Backward& layer = layers.of[again(number)];
        if (step >= 0 && length > step) {
            u64 cell = step * step_h + lane_cell;
            slot.fetch_8(0, layer.gates + cell * 4);
            slot.fetch_4(8, step > 0 ? layer.memories + (cell - step_h) : layer.first_memory + lane_cell);
            if (layer.from_y) slot.fetch_4(12, layer.from_y + (step * mask_steps * step_h + (lane_cell & ~1ull)));  // together with its neighbour's
        }
        slot.close();
    };
    if (there)  // padded steps have zero gradients
        for (int step = table.length[place]; step < lanes.steps; step++) *(uint2*)(layer.grads + ((u64)step * step_h + lane_cell) * 4) = make_uint2(0, 0);
    fetch(longest - 1);
    int next = after && longest == lanes.steps ? table.active(0, longest - 1) : 0;  // lanes that reach step + 1
    Gather<WARPGROUPS, 2 * KBLOCKS> gather;
    if (PREPARED) gather.prepare(table.lane, 4 * HIDDEN, tiles, warpgroup, thread & 127);
    // Step -1 computes the gradient of the initial h.
    for (int step = longest - 1; step >= (before ? 0 : -1); step--) {
        int now = step < 0 ? 0 : table.active(0, step);
        if (!PREPARED) gather.prepare(table.lane, 4 * HIDDEN, tiles, warpgroup, thread & 127);
        const Backward& at = layers.of[again(number)];
        // The gradients of the next step, or of the layer above at this one.
        const u16* from = (part < 2 ? at.grads + (step + 1) * step_h * 4 : at.above + step * step_h * 4) + (part & 1) * 2 * HIDDEN;
        gather.run(from, !gathers ? 0 : part < 2 ? next : now, gathers, BACKWARD_PAUSE, warpgroup);
        own.multiply(tiles, SUMS, warpgroup, warp, lane);
        __syncthreads();
        float quarter[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (owner) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                quarter[n] = total(SUMS, n * UNITS + unit, place);
                if (n != part) swap.give(turn, n, quarter[n]);
            }
        }
        done();
        parity ^= 1;
        // While the others' sums travel: everything that does not need them.
        uint4 kept = slot.read(owner);
        float c_before = __uint_as_float(kept.z), a[4], parts[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        unpack(kept.x, a[0], a[1]);
        unpack(kept.y, a[2], a[3]);
        Slopes slopes(a, c_before, c_now, Noise{nullptr, 1.0f, 0.0f, 0.0f}.of(0));
        slopes.hold();
        swap.sum(turn++, quarter, owner, parts);
        fetch(step - 1);
        // A lane that ended with the last step of this launch has no gradients behind it.
        bool follows = length > step + 1 || (length > step && step + 1 == lanes.steps && after);
        float dh = chosen(follows, parts[0] + parts[1], 0.0f);
        if (step >= 0 && length > step) {
            float low, high, d[4];
            unpack(kept.w, low, high);
            float of_y = (column & 1) ? high : low;
            dh += highest ? of_y : (masked ? of_y : 1.0f) * (parts[2] + parts[3]);
            if (step == length - 1 && at.grad_last_h) dh += at.grad_last_h[lane_cell];
            slopes.apply(dh, d, dc, past);
            store_pair(at.grads + ((u64)step * step_h + lane_cell) * 4, pack(d[0], d[1]), pack(d[2], d[3]));
            if (CELL != GRU) c_now = c_before;
#pragma unroll
            for (int n = 0; n < 4; n++) bias[n] += d[n];
        }
        if (step < 0 && length > 0) layer.grad_first_h[lane_cell] = dh;
        next = now;
    }
    if (there) {
        layer.grad_first_memory[lane_cell] = dc;
        if (length == 0) layer.grad_first_h[lane_cell] = layer.grad_last_h ? layer.grad_last_h[lane_cell] : 0.0f;
        else if (before) layer.grad_first_h[lane_cell] = 0.0f;
    }
    __syncthreads();
    if (owner) *(float4*)(partial + (unit * LANES + place) * 4) = make_float4(bias[0], bias[1], bias[2], bias[3]);
    __syncthreads();
    if (thread < UNITS * 4) {
        float sum = 0.0f;
        for (int n = 0; n < LANES; n++) sum += partial[((thread >> 2) * LANES + n) * 4 + (thread & 3)];
        layer.grad_bias[((u64)group * HIDDEN + member * UNITS) * 4 + thread] = sum;
    }
}
