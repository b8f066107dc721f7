// Half-precision numbers, two per 32-bit word: bf16, or fp16 if FP16 is set.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// All bits set: a NaN that no conversion produces. Marks a word as not yet written.
#define WORD_EMPTY 0xFFFFFFFFu

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
#if FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
#if FP16
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(word));
#else
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
#endif
}

// One number of a word, and one of an array.
__device__ __forceinline__ float half_of(u32 word, bool upper) {
    float low, high;
    unpack(word, low, high);
    return upper ? high : low;
}
__device__ __forceinline__ float half_at(const u16* from, u64 at) { return half_of(from[at], false); }
