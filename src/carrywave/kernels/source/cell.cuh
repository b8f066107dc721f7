// What a cell computes for one unit of one lane, forward and backward. Part of persistent.cu, joined.cu, wide.cu
// and stream.cu, whose constants it uses.
//
// Every cell has four numbers per unit and step, made of the products with the inputs and with h:
//   LSTM  input, forget, candidate and output gate; its memory is c
//   GRU   reset and update gate, the input's and h's part of the candidate; its memory is h itself, in float32
//   sLSTM input and forget gate before their exponentials, candidate and output gate; its memory is four numbers: c, n, m, and what m would be
//         without the step's input
// With NOISE, part of the candidate is dropped, and some units keep their old h or memory (zoneout): 1 as drawn, 2 by their mean.

#define LSTM 0
#define GRU 1
#define SLSTM 2
#if CELL == SLSTM
typedef float4 Memory;
#define SLOT 32  // bytes that a thread prefetches for a step
#define LEAST 1e-30f
__device__ __forceinline__ Memory nothing() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
#else
typedef float Memory;
#define SLOT 16
__device__ __forceinline__ Memory nothing() { return 0.0f; }
#endif

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Both saturate correctly: 2^x becomes infinite or 0. Their absolute error of 1e-7 is far below that of h.
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + power_of_2(-1.442695041f * x)); }
__device__ __forceinline__ float tanh_(float x) { return 1.0f - 2.0f * reciprocal(1.0f + power_of_2(2.885390082f * x)); }

__device__ __forceinline__ float exponential(float x) { return power_of_2(1.442695041f * x); }
// log(1 + e^x), which is about x where that overflows.
__device__ __forceinline__ float softplus(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exponential(-fabsf(x))));
    return fmaxf(x, 0.0f) + 0.6931471806f * y;
}

// One of two numbers, both of which are computed: a branch around one of them would hold up the other threads of the warp.
__device__ __forceinline__ float chosen(u32 condition, float yes, float no) {
    float x;
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %1, 0;\n\tselp.f32 %0, %2, %3, p;\n\t}" : "=f"(x) : "r"(condition), "f"(yes), "f"(no));
    return x;
}

#if CELL == SLSTM
__device__ __forceinline__ Memory chosen(u32 condition, Memory yes, Memory no) {
    return make_float4(chosen(condition, yes.x, no.x), chosen(condition, yes.y, no.y), chosen(condition, yes.z, no.z), chosen(condition, yes.w, no.w));
}
#endif

// What a launch is told about noise: a byte for each unit, lane and step, whose bits say that the candidate stays, and that h or the memory
// keeps its old value. Without the bytes, all candidates stay, and the old values have constant weights: the mean, for evaluation.
struct NoiseOf {
    float candidate, old_h, old_memory;
};
struct Noise {
    const unsigned char* bytes;  // [T, B, H]
    float scale, old_h, old_memory;

    __device__ __forceinline__ u32 fetch(u64 at) const { return NOISE == 1 ? bytes[at] : 0; }
    __device__ __forceinline__ NoiseOf of(u32 byte) const {
        if (!NOISE) return {1.0f, 0.0f, 0.0f};
        if (NOISE == 2) return {1.0f, old_h, old_memory};
        return {chosen(byte & 1, scale, 0.0f), chosen(byte & 2, 1.0f, 0.0f), chosen(byte & 4, 1.0f, 0.0f)};
    }
};
__device__ __forceinline__ float mixed(float now, float before, float weight) { return NOISE ? now + weight * (before - now) : now; }

// Where lanes start again: a bit for each step of the window, of which this launch's steps begin with number `first`. Forward keeps the
// words of its lanes in shared memory, those of 32 steps and of the next 32 in turn, and notes for backward in the last bit of a step's memory
// whether the lane has started again: that takes fewer instructions than loads of one's own, which every step would wait for.
struct Resets {
    const u32* bits;  // [B, words]
    int words, first;
    u32* kept;  // [2, LANES * PASSES]

    __device__ __forceinline__ u32 word(int lane, int step) const { return bits[(u64)lane * words + ((first + step) >> 5)]; }
    __device__ __forceinline__ bool in(u32 word, int step) const { return word >> ((first + step) & 31) & 1; }
    __device__ __forceinline__ u32* of(int place, int step) const { return kept + (((first + step) >> 5) & 1) * LANES * PASSES + place; }
    // Called by all threads at every step, some time before a barrier.
    __device__ __forceinline__ void keep(const int* lane_of, int step) const {
        if (step > 0 && ((first + step) & 31) != 0) return;
        for (int place = threadIdx.x; place < LANES * PASSES; place += blockDim.x) *of(place, step) = word(lane_of[place], step);
    }
    __device__ __forceinline__ bool at(int place, int step) const { return in(*of(place, step), step); }
};
__device__ __forceinline__ float noted(float memory, bool again) { return __uint_as_float((__float_as_uint(memory) & ~1u) | (u32)again); }
__device__ __forceinline__ bool note_in(float memory) { return __float_as_uint(memory) & 1; }
#if CELL == SLSTM
__device__ __forceinline__ Memory noted(Memory memory, bool again) { return make_float4(noted(memory.x, again), memory.y, memory.z, memory.w); }
__device__ __forceinline__ bool note_in(Memory memory) { return note_in(memory.x); }
#endif

// The next h; `a` becomes what backward needs, and the memory is updated. `h_before` is read only with NOISE.
__device__ __forceinline__ float cell_forward(float (&a)[4], Memory& memory, float h_before, const NoiseOf& noise) {
#if CELL == LSTM
    a[0] = sigmoid(a[0]), a[1] = sigmoid(a[1]), a[2] = tanh_(a[2]), a[3] = sigmoid(a[3]);
    float c = a[1] * memory + a[0] * (a[2] * noise.candidate), h = a[3] * tanh_(c);
    memory = mixed(c, memory, noise.old_memory);
    return mixed(h, h_before, noise.old_h);
#elif CELL == SLSTM
    float kept = memory.z - softplus(-a[1]), m = fmaxf(kept, a[0]);
    a[0] = exponential(a[0] - m), a[1] = exponential(kept - m), a[2] = tanh_(a[2]), a[3] = sigmoid(a[3]);
    memory.x = a[1] * memory.x + a[0] * (a[2] * noise.candidate);
    memory.y = a[1] * memory.y + a[0];
    memory.z = m, memory.w = kept;
    return mixed(a[3] * memory.x * reciprocal(fmaxf(memory.y, LEAST)), h_before, noise.old_h);
#else
    a[0] = sigmoid(a[0]), a[1] = sigmoid(a[1]), a[2] = tanh_(a[2] + a[0] * a[3]);
    float candidate = a[2] * noise.candidate;
    memory = mixed(candidate + a[1] * (memory - candidate), memory, noise.old_h);
    return memory;
#endif
}

// Backward, in two parts: what can be computed before the gradient of h is known, and what it turns that gradient into.
//
// `before` and `now`: the memory before and after the step. `hold`: compute it here, not where it is used. `apply`: from the gradient of h
// after the step, what reaches the four sums (`d`) and the memory before the step (`memory`, on entry that after it), and h before the step
// otherwise than through the product (`past`).
#define HOLD(x) asm volatile("" : "+f"(x));
struct Slopes {
#if CELL == LSTM
    float output, through, input, forget_memory, candidate, forget, old_h, old_memory;

    Slopes() = default;
    __device__ __forceinline__ Slopes(const float (&a)[4], float before, float now, const NoiseOf& noise) {
        float g = a[2] * noise.candidate;
        if (NOISE) now = a[1] * before + a[0] * g;
        float squashed = tanh_(now);
        output = squashed * a[3] * (1.0f - a[3]);
        through = a[3] * (1.0f - squashed * squashed);
        input = g * a[0] * (1.0f - a[0]);
        forget_memory = before * a[1] * (1.0f - a[1]);
        candidate = a[0] * noise.candidate * (1.0f - a[2] * a[2]);
        forget = a[1], old_h = noise.old_h, old_memory = noise.old_memory;
    }
    __device__ __forceinline__ void hold() { HOLD(output) HOLD(through) HOLD(input) HOLD(forget_memory) HOLD(candidate) }
    __device__ __forceinline__ void apply(float dh, float (&d)[4], float& memory, float& past) const {
        float kept = NOISE ? old_memory * memory : 0.0f;
        past = NOISE ? old_h * dh : 0.0f;
        dh -= past;
        d[3] = dh * output;
        float d_c = memory - kept + dh * through;
        d[0] = d_c * input, d[1] = d_c * forget_memory, d[2] = d_c * candidate;
        memory = d_c * forget + kept;
    }
#elif CELL == SLSTM
    // Scaling c, n and e^m together changes nothing, so that m has a gradient of its own only if somebody reads it by itself: `memory.z` is
    // that part, which passes to whichever of the two gates has set m.
    float output, to_c, to_n, candidate, add, keep, c, n, z, rest, set, old_h;

    __device__ __forceinline__ Slopes(const float (&a)[4], Memory before, Memory now, const NoiseOf& noise) {
        float inverse = reciprocal(fmaxf(now.y, LEAST)), mean = now.x * inverse;
        output = mean * a[3] * (1.0f - a[3]);
        to_c = a[3] * inverse;
        to_n = now.y > LEAST ? -a[3] * inverse * mean : 0.0f;
        z = a[2] * noise.candidate;
        candidate = a[0] * noise.candidate * (1.0f - a[2] * a[2]);
        // The forget gate's weight again, exactly: it may be multiplied with large sums that cancel out.
        keep = exponential(now.w - now.z), rest = 1.0f - exponential(now.w - before.z), set = now.z > now.w ? 1.0f : 0.0f;
        add = a[0], c = before.x, n = before.y, old_h = noise.old_h;
    }
    __device__ __forceinline__ void hold() { HOLD(output) HOLD(to_c) HOLD(to_n) HOLD(candidate) HOLD(keep) HOLD(rest) HOLD(set) }
    __device__ __forceinline__ void apply(float dh, float (&d)[4], Memory& memory, float& past) const {
        past = NOISE ? old_h * dh : 0.0f;
        dh -= past;
        float d_c = memory.x + dh * to_c, d_n = memory.y + dh * to_n, to_input = set * memory.z, to_m = memory.z - to_input;
        d[0] = (d_c * z + d_n) * add + to_input;
        d[1] = ((d_c * c + d_n * n) * keep + to_m) * rest;
        d[2] = d_c * candidate;
        d[3] = dh * output;
        memory = make_float4(d_c * keep, d_n * keep, to_m, 0.0f);
    }
#else
    float reset, update, candidate, reset_gate, update_gate, old_h;

    Slopes() = default;
    __device__ __forceinline__ Slopes(const float (&a)[4], float before, float now, const NoiseOf& noise) {
        float n = a[2] * noise.candidate;
        update = (before - n) * a[1] * (1.0f - a[1]);
        candidate = (1.0f - a[1]) * noise.candidate * (1.0f - a[2] * a[2]);
        reset = a[3] * a[0] * (1.0f - a[0]);
        reset_gate = a[0], update_gate = a[1], old_h = noise.old_h;
    }
    __device__ __forceinline__ void hold() { HOLD(reset) HOLD(update) HOLD(candidate) }
    __device__ __forceinline__ void apply(float dh, float (&d)[4], float& memory, float& past) const {
        dh += memory;  // h is the memory
        float kept = NOISE ? old_h * dh : 0.0f;
        dh -= kept;
        d[1] = dh * update;
        d[2] = dh * candidate;
        d[3] = d[2] * reset_gate;
        d[0] = d[2] * reset;
        memory = dh * update_gate + kept;
        past = 0.0f;
    }
#endif
};
