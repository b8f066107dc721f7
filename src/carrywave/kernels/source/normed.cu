// One step of a layer with norms inside its cell, forward and backward: everything but the recurrent product, which a matrix library
// computes between two launches. One block for each lane.
//
// The norm of the recurrent product is over all gates; an LSTM also normalises c before its tanh.
//
// Compile-time constants, set by the host: CELL (0 LSTM, 1 GRU), HIDDEN, WIDE (float32), otherwise FP16.

#include "half.cuh"

#define THREADS 256
#define EACH ((HIDDEN + THREADS - 1) / THREADS)  // units per thread
#define LSTM (CELL == 0)
#define GATES (LSTM ? 4 : 3)
#define EPSILON 1e-5f

#if WIDE
typedef float Number;
__device__ __forceinline__ float wide(Number x) { return x; }
__device__ __forceinline__ Number narrow(float x) { return x; }
#else
typedef u16 Number;
__device__ __forceinline__ float wide(Number x) { return half_of(x, false); }
__device__ __forceinline__ Number narrow(float x) { return (u16)pack(x, 0.0f); }
#endif

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The sums of two numbers over all threads of the block, always in the same order.
__device__ __forceinline__ float2 block_sum(float a, float b) {
    __shared__ float2 of_warp[THREADS / 32];
#pragma unroll
    for (int n = 16; n > 0; n /= 2) a += __shfl_xor_sync(0xFFFFFFFFu, a, n), b += __shfl_xor_sync(0xFFFFFFFFu, b, n);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = make_float2(a, b);
    __syncthreads();
    float2 sum = of_warp[0];
#pragma unroll
    for (int n = 1; n < THREADS / 32; n++) sum.x += of_warp[n].x, sum.y += of_warp[n].y;
    return sum;
}

// Mean and reciprocal deviation of `count` numbers, of which each thread has some. Two passes: differences of large sums would cancel.
template <int N>
__device__ __forceinline__ float2 moments(const float (&x)[N], int count, int missing) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) sum += x[n];
    float mean = block_sum(sum, 0.0f).x / count;
#pragma unroll
    for (int n = 0; n < N; n++) squares += (x[n] - mean) * (x[n] - mean);
    squares = block_sum(squares, 0.0f).x - missing * mean * mean;  // numbers that no unit has are 0 in every thread that has them
    return make_float2(mean, rsqrtf(fmaxf(squares, 0.0f) / count + EPSILON));
}

#define UNITS for (int n = 0; n < EACH; n++)
#define UNIT (n * THREADS + threadIdx.x)
#define THERE (HIDDEN % THREADS == 0 || UNIT < HIDDEN)
#define NOBODY (EACH * THREADS - HIDDEN)

// How a step reads its lane: not at all beyond its length, and from zeros where it starts again.
#define LANE                                                                                                          \
    int lane = blockIdx.x;                                                                                             \
    bool real = !lengths || step < lengths[lane], again = real && resets && resets[(u64)step * gridDim.x + lane];       \
    u64 row = (u64)lane * HIDDEN, rows = (u64)lane * GATES * HIDDEN;

extern "C" __global__ void __launch_bounds__(THREADS) normed_forward(
    const Number* product,         // [B, G]: h times the recurrent weights
    const Number* inputs,          // [B, G]
    const float* gain, const float* bias,      // [G], of the norm of the product; the bias may be null
    const float* gain_c, const float* bias_c,  // [H], of the norm of c
    const float* before,           // [B, H]: the memory (c, or h in float32)
    float* after,
    const Number* h_before, Number* h,         // [B, H]
    Number* gates,                 // [B, G], or null: the activated gates, for backward
    float* moments_of,             // [B, 4]: mean and reciprocal deviation of the product and of c
    const unsigned char* resets, const long long* lengths, int step) {
    LANE
    if (!real) {
        UNITS if (THERE) {
            after[row + UNIT] = before[row + UNIT], h[row + UNIT] = h_before[row + UNIT];
            for (int gate = 0; gate < GATES && gates; gate++) gates[rows + gate * HIDDEN + UNIT] = narrow(0.0f);
        }
        if (gates && threadIdx.x == 0) *(float4*)(moments_of + lane * 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return;
    }
    float a[GATES * EACH];
#pragma unroll
    for (int gate = 0; gate < GATES; gate++)
#pragma unroll
        UNITS a[gate * EACH + n] = THERE && !again ? wide(product[rows + gate * HIDDEN + UNIT]) : 0.0f;
    float2 of_product = moments(a, GATES * HIDDEN, GATES * NOBODY);
    float c[EACH];
#pragma unroll
    UNITS {
        c[n] = 0.0f;
        if (!THERE) continue;
        float q[GATES], x[GATES], memory = again ? 0.0f : before[row + UNIT];
#pragma unroll
        for (int gate = 0; gate < GATES; gate++) {
            int at = gate * HIDDEN + UNIT;
            q[gate] = (a[gate * EACH + n] - of_product.x) * of_product.y * gain[at] + (bias ? bias[at] : 0.0f);
            x[gate] = wide(inputs[rows + at]);
        }
#if LSTM
        float i = sigmoid(x[0] + q[0]), f = sigmoid(x[1] + q[1]), g = tanhf(x[2] + q[2]), o = sigmoid(x[3] + q[3]);
        c[n] = f * memory + i * g;
        a[n] = i, a[EACH + n] = f, a[2 * EACH + n] = g, a[3 * EACH + n] = o;
        after[row + UNIT] = c[n];
#else
        float r = sigmoid(x[0] + q[0]), z = sigmoid(x[1] + q[1]), candidate = tanhf(x[2] + r * q[2]);
        float next = candidate + z * (memory - candidate);
        a[n] = r, a[EACH + n] = z, a[2 * EACH + n] = candidate;
        after[row + UNIT] = next, h[row + UNIT] = narrow(next);
#endif
    }
    float2 of_c = make_float2(0.0f, 0.0f);
#if LSTM
    of_c = moments(c, HIDDEN, NOBODY);
#pragma unroll
    UNITS if (THERE) h[row + UNIT] = narrow(a[3 * EACH + n] * tanhf((c[n] - of_c.x) * of_c.y * gain_c[UNIT] + bias_c[UNIT]));
#endif
    if (!gates) return;
#pragma unroll
    for (int gate = 0; gate < GATES; gate++)
#pragma unroll
        UNITS if (THERE) gates[rows + gate * HIDDEN + UNIT] = narrow(a[gate * EACH + n]);
    if (threadIdx.x == 0) *(float4*)(moments_of + lane * 4) = make_float4(of_product.x, of_product.y, of_c.x, of_c.y);
}

extern "C" __global__ void __launch_bounds__(THREADS) normed_backward(
    const Number* product, const Number* gates, const float* moments_of, const float* before, const float* after,
    const float* gain, const float* bias, const float* gain_c, const float* bias_c,
    const Number* grad_h,          // [B, H]: through the recurrent product of the next step, or null
    const Number* grad_y,          // [B, H]
    float* grad_past,              // [B, H]: of h, otherwise than through the product; of the step after, replaced by that of this step
    float* grad_memory,            // [B, H]: the same of the memory
    Number* grad_inputs,           // [B, G]
    Number* grad_product,          // [B, G]
    float* grad_normed,            // [B, H]: of c after its norm
    const unsigned char* resets, const long long* lengths, int step) {
    LANE
    float dh[EACH];
#pragma unroll
    UNITS {
        dh[n] = 0.0f;
        if (THERE) dh[n] = grad_past[row + UNIT] + wide(grad_y[row + UNIT]) + (grad_h ? wide(grad_h[row + UNIT]) : 0.0f);
    }
    if (!real) {
        UNITS if (THERE) {
            grad_past[row + UNIT] = dh[n];
            if (LSTM) grad_normed[row + UNIT] = 0.0f;
            for (int gate = 0; gate < GATES; gate++) {
                grad_inputs[rows + gate * HIDDEN + UNIT] = narrow(0.0f);
                grad_product[rows + gate * HIDDEN + UNIT] = narrow(0.0f);
            }
        }
        return;
    }
    float4 of = *(const float4*)(moments_of + lane * 4);
    float dc[EACH], d[GATES * EACH];
#if LSTM
    float normed[EACH], to_c[EACH], sum = 0.0f, dot = 0.0f;
#pragma unroll
    UNITS {
        normed[n] = to_c[n] = 0.0f;
        if (!THERE) continue;
        normed[n] = (after[row + UNIT] - of.z) * of.w;
        float o = wide(gates[rows + 3 * HIDDEN + UNIT]), squashed = tanhf(normed[n] * gain_c[UNIT] + bias_c[UNIT]);
        float through = dh[n] * o * (1.0f - squashed * squashed);
        d[3 * EACH + n] = dh[n] * squashed * o * (1.0f - o);
        grad_normed[row + UNIT] = through;
        to_c[n] = through * gain_c[UNIT];
        sum += to_c[n], dot += to_c[n] * normed[n];
    }
    float2 total = block_sum(sum, dot);
#pragma unroll
    UNITS dc[n] = THERE ? grad_memory[row + UNIT] + of.w * (to_c[n] - total.x / HIDDEN - normed[n] * total.y / HIDDEN) : 0.0f;
#else
#pragma unroll
    UNITS dc[n] = THERE ? dh[n] + grad_memory[row + UNIT] : 0.0f;
#endif
    float first = 0.0f, second = 0.0f;  // of the gradients of the normalised product, and of their products with it
    float scaled[GATES * EACH], hats[GATES * EACH];
#pragma unroll
    UNITS {
#pragma unroll
        for (int gate = 0; gate < GATES; gate++) scaled[gate * EACH + n] = hats[gate * EACH + n] = 0.0f;
        if (!THERE) continue;
        float memory = again ? 0.0f : before[row + UNIT], q = 0.0f, on_product[GATES];
#pragma unroll
        for (int gate = 0; gate < GATES; gate++) {
            int at = gate * HIDDEN + UNIT;
            hats[gate * EACH + n] = again ? 0.0f : (wide(product[rows + at]) - of.x) * of.y;
            if (gate == 2) q = hats[gate * EACH + n] * gain[at] + (bias ? bias[at] : 0.0f);
        }
        float g0 = wide(gates[rows + UNIT]), g1 = wide(gates[rows + HIDDEN + UNIT]), g2 = wide(gates[rows + 2 * HIDDEN + UNIT]);
#if LSTM
        d[n] = dc[n] * g2 * g0 * (1.0f - g0);
        d[EACH + n] = dc[n] * memory * g1 * (1.0f - g1);
        d[2 * EACH + n] = dc[n] * g0 * (1.0f - g2 * g2);
#pragma unroll
        for (int gate = 0; gate < GATES; gate++) on_product[gate] = d[gate * EACH + n];
        grad_memory[row + UNIT] = again ? 0.0f : dc[n] * g1;
#else
        d[EACH + n] = dc[n] * (memory - g2) * g1 * (1.0f - g1);
        d[2 * EACH + n] = dc[n] * (1.0f - g1) * (1.0f - g2 * g2);
        d[n] = d[2 * EACH + n] * q * g0 * (1.0f - g0);
        on_product[0] = d[n], on_product[1] = d[EACH + n], on_product[2] = d[2 * EACH + n] * g0;
        grad_memory[row + UNIT] = again ? 0.0f : dc[n] * g1;
#endif
        grad_past[row + UNIT] = 0.0f;
#pragma unroll
        for (int gate = 0; gate < GATES; gate++) {
            int at = gate * HIDDEN + UNIT;
            grad_inputs[rows + at] = narrow(d[gate * EACH + n]);
            scaled[gate * EACH + n] = on_product[gate] * gain[at];
            first += scaled[gate * EACH + n], second += scaled[gate * EACH + n] * hats[gate * EACH + n];
        }
    }
    float2 means = block_sum(first, second);
    means.x /= GATES * HIDDEN, means.y /= GATES * HIDDEN;
#pragma unroll
    for (int gate = 0; gate < GATES; gate++)
#pragma unroll
        UNITS if (THERE) {
            float each = of.y * (scaled[gate * EACH + n] - means.x - hats[gate * EACH + n] * means.y);
            grad_product[rows + gate * HIDDEN + UNIT] = narrow(again ? 0.0f : each);
        }
}
