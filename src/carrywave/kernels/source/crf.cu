// Linear chains over labels, one lane a block and one label a thread: sums over all paths, and the probabilities of labels and of pairs of
// labels (forward-backward algorithm), and the best path (Viterbi).
//
// Sums are of logarithms, each taken relative to its largest term, so that nothing underflows. What a lane's scores have in common is
// taken off at every step and added up in double precision, so that long sequences lose no digits. Everything is in a fixed order.
//
// Compile-time constants, set by the host: LABELS, ROWS (of the matrix of pairs, for each thread), DOUBLE.

typedef long long i64;

#define UNKNOWN -100
#if DOUBLE
typedef double real;
#define EXP exp
#define LOG log
#define MOST fmax
#else
typedef float real;
#define EXP(x) exp2f((x) * 1.4426950408889634f)
#define LOG logf
#define MOST fmaxf
#endif
#define NOTHING ((real)(-1.0 / 0.0))  // the logarithm of 0
// As many threads as a block has at most: a thread's registers are limited by it.
#define THREADS (LABELS < 1024 ? (LABELS + 31) / 32 * 32 : 1024)
#define EACH_LABEL(label) for (int label = threadIdx.x; label < LABELS; label += blockDim.x)

struct Sum {
    real value, top;  // the logarithm of the sum, less the largest of the scores that were joined; that score
};

// log sum_n e^(scores[n] + steps[n LABELS]) for the labels n that may be: all of them, or the one that is known.
__device__ __forceinline__ Sum joined(const real* scores, const real* __restrict__ steps, i64 known) {
    int low = known == UNKNOWN ? 0 : (int)known, high = known == UNKNOWN ? LABELS : (int)known + 1;
    real top = NOTHING, most = NOTHING, total = 0;
#pragma unroll 8
    for (int n = low; n < high; n++) {
        top = MOST(top, scores[n]);
        most = MOST(most, scores[n] + steps[n * LABELS]);
    }
    // Nothing to join, or nothing that is a number.
    if (!(most > NOTHING)) return {scores[low] + steps[low * LABELS], top};
#pragma unroll 8
    for (int n = low; n < high; n++) total += EXP(scores[n] + steps[n * LABELS] - most);
    return {most - top + LOG(total), top};
}

// alphas: sums over the beginnings of paths; betas: over their ends, from the label of a step on, such that alphas[t - 1][i] + the
// transition + betas[t][j] is the logarithm of a pair's probability. shares: the probabilities of labels, 0 after the end of a lane.
// Of each, the first half is over all paths (blockIdx.y 0), the second over those through the known labels. Without alphas, only totals.
extern "C" __global__ void __launch_bounds__(THREADS) crf_sums(
    const real* __restrict__ emissions, const i64* __restrict__ tags, const i64* __restrict__ lengths, const real* __restrict__ start,
    const real* __restrict__ transitions, const real* __restrict__ turned, const real* __restrict__ end, real* alphas, real* betas,
    real* shares, double* offsets, double* totals, int steps, int lanes) {
    extern __shared__ char memory[];
    real* rows = (real*)memory;
    int lane = blockIdx.x, held = blockIdx.y, length = (int)(lengths[lane] < steps ? lengths[lane] : steps);
    i64 half = (i64)held * steps * lanes;
    auto place = [&](int t) { return ((i64)t * lanes + lane) * LABELS; };
    auto tag_at = [&](int t) { return held ? tags[(i64)t * lanes + lane] : (i64)UNKNOWN; };
    bool kept = alphas != nullptr;
    if (kept)
        for (int t = length; t < steps; t++)
            EACH_LABEL(k) shares[half * LABELS + place(t) + k] = 0;
    // A tag that is no label makes the loss and the gradient NaN; nothing is read out of bounds.
    bool wrong = false;
    for (int t = 0; t < length; t++) {
        i64 tag = tag_at(t);
        wrong = wrong || (tag != UNKNOWN && (tag < 0 || tag >= LABELS));
    }
    if (length == 0 || wrong) {
        if (threadIdx.x == 0) totals[held * lanes + lane] = wrong ? 0.0 / 0.0 : 0.0;
        for (int t = 0; kept && t < length; t++) EACH_LABEL(k) {
            i64 at = half * LABELS + place(t) + k;
            alphas[at] = betas[at] = shares[at] = (real)(0.0 / 0.0);
        }
        return;
    }
    double offset = 0;
    for (int t = 0; t < length; t++) {
        real *from = rows + (t + 1) % 2 * LABELS, *to = rows + t % 2 * LABELS;
        i64 tag = tag_at(t), before = t ? tag_at(t - 1) : UNKNOWN;
        real top = 0;
        EACH_LABEL(k) {
            real own = emissions[place(t) + k];
            Sum sum = {t ? (real)0 : start[k], (real)0};
            if (t) sum = joined(from, transitions + k, before);
            top = sum.top;
            to[k] = tag == UNKNOWN || tag == k ? sum.value + own : NOTHING;
            if (kept) alphas[half * LABELS + place(t) + k] = to[k];
        }
        offset += top;
        if (kept && threadIdx.x == 0) offsets[half + (i64)t * lanes + lane] = offset;
        __syncthreads();
    }
    // The end is a further step to a single label.
    double total = 0;
    {
        const real* last = rows + (length - 1) % 2 * LABELS;
        real most = NOTHING, sum = 0;
        for (int n = 0; n < LABELS; n++) most = MOST(most, last[n] + end[n]);
        for (int n = 0; n < LABELS; n++) sum += EXP(last[n] + end[n] - most);
        total = most > NOTHING ? offset + most + LOG(sum) : offset + last[0] + end[0];
        if (threadIdx.x == 0) totals[held * lanes + lane] = total;
    }
    if (!kept) return;
    double taken = 0;  // off the betas
    for (int t = length - 1; t >= 0; t--) {
        __syncthreads();  // the row that is written now has been read
        real *from = rows + (t + 1) % 2 * LABELS, *to = rows + t % 2 * LABELS;
        i64 tag = tag_at(t), after = t + 1 < length ? tag_at(t + 1) : UNKNOWN;
        EACH_LABEL(k) {
            real own = emissions[place(t) + k];
            Sum sum = {t + 1 < length ? (real)0 : end[k], (real)0};
            if (t + 1 < length) sum = joined(from, turned + k, after);
            double gone = taken + sum.top;
            i64 at = half * LABELS + place(t) + k;
            shares[at] = EXP(alphas[at] + sum.value - (real)(total - offsets[half + (i64)t * lanes + lane] - gone));
            to[k] = tag == UNKNOWN || tag == k ? sum.value + own : NOTHING;
            if (t) betas[at] = to[k] - (real)(total - offsets[half + (i64)(t - 1) * lanes + lane] - gone);
            if (k + blockDim.x >= LABELS) taken = gone;  // the last of this thread's labels
        }
    }
}

// pairs[chunk][i][j]: the sum over every so many-th step of all lanes of the weight times the difference of a pair's two probabilities.
extern "C" __global__ void __launch_bounds__(THREADS) crf_pairs(
    const real* __restrict__ alphas, const real* __restrict__ betas, const i64* __restrict__ tags, const i64* __restrict__ lengths,
    const double* __restrict__ weights, const real* __restrict__ transitions, real* pairs, int steps, int lanes) {
    int first = blockIdx.x * ROWS;
    i64 half = (i64)steps * lanes * LABELS;
    EACH_LABEL(to) {
        real step[ROWS], sums[ROWS];
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            step[n] = first + n < LABELS ? transitions[(first + n) * LABELS + to] : NOTHING;
            sums[n] = 0;
        }
        for (int at = blockIdx.y; at < (steps - 1) * lanes; at += gridDim.y) {
            int lane = at % lanes;
            if (at / lanes + 1 >= lengths[lane]) continue;
            real weight = weights == nullptr ? (real)1 : (real)weights[lane];
            i64 before = (i64)at * LABELS, after = before + (i64)lanes * LABELS;
            i64 one = tags[at], other = tags[at + lanes];
            bool known = one != UNKNOWN && other != UNKNOWN;
            real beta = betas[after + to], held_beta = known ? NOTHING : betas[half + after + to];
#pragma unroll
            for (int n = 0; n < ROWS; n++) {
                if (first + n >= LABELS) break;
                real share = EXP(alphas[before + first + n] + step[n] + beta), held = known && one == first + n && other == to ? 1 : 0;
                if (!known) held = EXP(alphas[half + before + first + n] + step[n] + held_beta);
                sums[n] += weight * (share - held);
            }
        }
#pragma unroll
        for (int n = 0; n < ROWS; n++)
            if (first + n < LABELS) pairs[((i64)blockIdx.y * LABELS + first + n) * LABELS + to] = sums[n];
    }
}

// paths[t][lane]: the labels of the path with the highest score; of equal ones, the lower label. befores: from which label each was reached.
extern "C" __global__ void __launch_bounds__(THREADS) crf_best(
    const real* __restrict__ emissions, const i64* __restrict__ lengths, const real* __restrict__ start, const real* __restrict__ transitions,
    const real* __restrict__ end, int* befores, i64* paths, int steps, int lanes) {
    extern __shared__ char memory[];
    real* rows = (real*)memory;
    int lane = blockIdx.x, length = (int)(lengths[lane] < steps ? lengths[lane] : steps);
    auto place = [&](int t) { return ((i64)t * lanes + lane) * LABELS; };
    if (length == 0) return;
    for (int t = 0; t < length; t++) {
        real *from = rows + (t + 1) % 2 * LABELS, *to = rows + t % 2 * LABELS;
        EACH_LABEL(k) {
            real own = emissions[place(t) + k];
            if (t == 0) {
                to[k] = start[k] + own;
                continue;
            }
            real best = NOTHING, top = NOTHING;
            int best_from = 0;
#pragma unroll 8
            for (int n = 0; n < LABELS; n++) {
                real score = from[n] + transitions[n * LABELS + k];
                top = MOST(top, from[n]);
                if (score > best) best = score, best_from = n;
            }
            to[k] = best - top + own;
            befores[place(t) + k] = best_from;
        }
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    const real* last = rows + (length - 1) % 2 * LABELS;
    real best = last[0] + end[0];
    int label = 0;
    for (int n = 1; n < LABELS; n++)
        if (last[n] + end[n] > best) best = last[n] + end[n], label = n;
    for (int t = length - 1; t >= 0; t--) {
        paths[(i64)t * lanes + lane] = label;
        if (t) label = befores[place(t) + label];
    }
}
