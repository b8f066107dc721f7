// How a block of persistent.cu goes about the passes of a step, if there are several. Part of persistent.cu, whose constants it uses.
//
// Those of a wide layer do not fit into the instruction cache together: the loop over them is not unrolled (ROLLED). If each has few lanes, half
// of the threads is enough to own its units: the two HALVES own every other pass. Then each thread keeps half as much in its registers, and the
// half that is idle fetches what its own passes need next.
#define ROLLED (PASSES > 1 && KPW > 5)
#define HALVES (ROLLED && PASSES % 2 == 0 && 2 * OWNERS <= THREADS && !CLUSTER)
#define KEPT (HALVES ? PASSES / 2 : PASSES)                     // passes of a thread
#define OWNED (HALVES ? threadIdx.x % OWNERS : threadIdx.x)     // which of a pass's owners a thread is
#define PENDING (HALVES ? 0 : PASSES - 1)                       // copies for later passes that may be under way when a pass reads its own
constexpr int AT_A_TIME = ROLLED ? 1 : PASSES;                  // passes that are unrolled

// Clock cycles before the first poll, as measured on an H200. With several passes, the work of the other passes is pause enough.
#define FORWARD_PAUSE (PASSES > 1 ? 0 : LANES > 8 ? 500 : 300)
#define BACKWARD_PAUSE (PASSES > 1 || KBLOCKS < (CLUSTER ? 4 : 8) ? 0 : 300)

// What a thread keeps of its passes stays in registers: in a loop that is not unrolled, the passes take turns with the first place. At the
// beginning and at the end, each has its own again.
#define IN_TURN(pass) (ROLLED ? 0 : (pass))
#define OWN_PLACE(pass) (HALVES ? (pass) / 2 : (pass))
template <typename Kept>
__device__ __forceinline__ void turn_one(Kept (&of)[KEPT]) {
    Kept first = of[0];
#pragma unroll
    for (int n = 1; n < KEPT; n++) of[n - 1] = of[n];
    of[KEPT - 1] = first;
}
template <typename... Kept>
__device__ __forceinline__ void turn(bool now, Kept (&... of)[KEPT]) {
    if (ROLLED && now) (turn_one(of), ...);
}

// Adds up what the owners of each unit have over its lanes, always in the same order: 2 to the power of POWER numbers each. `at`: which owner
// this thread is, of either half; `first`: where the block's units begin in `out`.
template <int POWER, typename Numbers>
__device__ __forceinline__ void sum_lanes(float* partial, int thread, bool owning, int at, Numbers own, float* out, u64 first) {
    constexpr int EACH = 1 << POWER;
    __syncthreads();
    if (owning) *(Numbers*)(partial + at * EACH) = own;
    __syncthreads();
    if (thread < UNITS * EACH) {
        float sum = 0.0f;
        for (int n = 0; n < LANES; n++) sum += partial[((thread >> POWER) * LANES + n) * EACH + (thread & (EACH - 1))];
        for (int n = 0; HALVES && n < LANES; n++) sum += partial[(OWNERS + (thread >> POWER) * LANES + n) * EACH + (thread & (EACH - 1))];
        out[first * EACH + thread] = sum;
    }
}
