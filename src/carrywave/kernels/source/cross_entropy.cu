// Cross entropy over the classes of each row, from logits in half precision: forward reads them once, and backward once more while it
// writes their gradient. Everything is computed in float32 and in a fixed order. One block per row; rows are `pitch` numbers apart.
//
// Compile-time constant, set by the host: FP16.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define THREADS 512
#define LOG2E 1.4426950408889634f
#define LOWEST -3.0e38f

__device__ __forceinline__ float wide(u16 half) {
#if FP16
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
#else
    return __uint_as_float((u32)half << 16);
#endif
}

__device__ __forceinline__ u16 narrow(float x) {
    u16 half;
#if FP16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(x));
#endif
    return half;
}

// A running maximum, and the sum of exp(x - maximum).
struct Sum {
    float highest, total;

    __device__ __forceinline__ void add(float x) {
        if (x > highest) {
            total = total * exp2f((highest - x) * LOG2E) + 1.0f;
            highest = x;
        } else {
            total += exp2f((x - highest) * LOG2E);
        }
    }
    __device__ __forceinline__ void join(float other_highest, float other_total) {
        float most = fmaxf(highest, other_highest);
        total = total * exp2f((highest - most) * LOG2E) + other_total * exp2f((other_highest - most) * LOG2E);
        highest = most;
    }
};

// losses[row] = log(sum exp logits) - logits[target], 0 if the target is `ignored`; logarithms[row] = log(sum exp logits).
extern "C" __global__ void __launch_bounds__(THREADS) score_forward(
    const u16* __restrict__ logits, const long long* __restrict__ targets, float* losses, float* logarithms, int classes, int pitch, int ignored) {
    __shared__ float highest[THREADS / 32], total[THREADS / 32];
    u64 row = blockIdx.x;
    long long target = targets[row];
    if (target == ignored || target < 0 || target >= classes) {
        // A target that is not a class makes the loss and the gradient NaN; nothing is read out of bounds.
        if (threadIdx.x == 0) losses[row] = logarithms[row] = target == ignored ? 0.0f : __uint_as_float(0x7FFFFFFFu);
        return;
    }
    const u16* from = logits + row * pitch;
    Sum sum = {LOWEST, 0.0f};
    if (classes % 2 == 0 && pitch % 2 == 0) {
        const u32* pairs = (const u32*)from;
#pragma unroll 4
        for (int n = threadIdx.x; n < classes / 2; n += THREADS) {
            u32 pair = pairs[n];
            sum.add(wide((u16)pair));
            sum.add(wide((u16)(pair >> 16)));
        }
    } else {
        for (int n = threadIdx.x; n < classes; n += THREADS) sum.add(wide(from[n]));
    }
#pragma unroll
    for (int far = 16; far > 0; far >>= 1) sum.join(__shfl_xor_sync(0xFFFFFFFFu, sum.highest, far), __shfl_xor_sync(0xFFFFFFFFu, sum.total, far));
    if (threadIdx.x % 32 == 0) highest[threadIdx.x / 32] = sum.highest, total[threadIdx.x / 32] = sum.total;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int n = 1; n < THREADS / 32; n++) sum.join(highest[n], total[n]);
        float logarithm = sum.highest + logf(sum.total);
        logarithms[row] = logarithm;
        losses[row] = logarithm - wide(from[target]);
    }
}

// grads = (softmax(logits) - one_hot(target)) * scale of the row, 0 in rows whose target is `ignored`. Scales are `scale_pitch` numbers apart.
extern "C" __global__ void __launch_bounds__(THREADS) score_backward(
    const u16* __restrict__ logits, const long long* __restrict__ targets, const float* __restrict__ logarithms, const float* __restrict__ scale, u16* grads,
    int classes, int pitch, int grads_pitch, int scale_pitch, int ignored) {
    u64 row = blockIdx.x;
    long long target = targets[row];
    bool real = target != ignored;
    float factor = scale[row * scale_pitch], below = real ? logarithms[row] * LOG2E : 0.0f;
    const u16* from = logits + row * pitch;
    u16* to = grads + row * grads_pitch;
    auto slope = [&](u16 logit, int n) { return real ? (exp2f(wide(logit) * LOG2E - below) - (n == target ? 1.0f : 0.0f)) * factor : 0.0f; };
    if (classes % 2 == 0 && pitch % 2 == 0) {
#pragma unroll 4
        for (int n = threadIdx.x; n < classes / 2; n += THREADS) {
            u32 pair = ((const u32*)from)[n];
            ((u32*)to)[n] = narrow(slope((u16)pair, 2 * n)) | (u32)narrow(slope((u16)(pair >> 16), 2 * n + 1)) << 16;
        }
    } else {
        for (int n = threadIdx.x; n < classes; n += THREADS) to[n] = narrow(slope(from[n], n));
    }
}
