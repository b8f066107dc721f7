// What the threads of wide.cu and stream.cu have in common: each owns EACH (4) neighbouring units of one lane in each pass, whose numbers it reads
// and writes as vectors. Part of both, whose constants it uses.

// What a thread prefetches for a pass: gates; in backward also the memory (4 bytes of a unit) and the gradient of y (2). 16 bytes of each thread
// lie together.
#define SLOT_PARTS ((EACH * 14 + 15) / 16)
#define SLOT_BYTES (SLOT_PARTS * THREADS * 16)
#define PART(n) ((n) * THREADS * 16)

// A product of 64 rows and 64 columns: the 32 sums of a thread.
#define D_OPS(d) D16(d, 0), D16(d, 16)
#define D_LIST                                                                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                                            \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

struct Owner {
    const Lanes& lanes;
    const Table& table;
    int group, place, column;  // of the block's lanes; of this thread's lane in a pass; its first unit
    u32 slots;                 // where its slots begin
    u64 step_h;                // from one step of h to the next

    __device__ __forceinline__ int at(int pass) const { return pass * LANES + place; }
    __device__ __forceinline__ bool there(int pass) const { return group + at(pass) * lanes.groups < lanes.count; }
    __device__ __forceinline__ u64 cell(int pass) const { return (u64)table.lane[at(pass)] * HIDDEN + column; }
    __device__ __forceinline__ Slot slot(int pass) const { return {slots + pass * SLOT_BYTES}; }

    // For forward.
    __device__ __forceinline__ void fetch(const u16* gates, int step, int pass) const {
        Slot to = slot(pass);
        const u16* from = gates + (step * step_h + (u64)table.lane[at(pass)] * HIDDEN + column) * 4;
        if (table.length[at(pass)] > step) {
#pragma unroll
            for (int n = 0; n < EACH / 2; n++) to.fetch_16(PART(n), from + n * 8);
        }
        to.close();
    }
    // For backward.
    __device__ __forceinline__ void fetch(const u16* gates, const float* memories, const float* first_memory, const u16* grad_y, int step, int pass) const {
        Slot to = slot(pass);
        if (step >= 0 && table.length[at(pass)] > step) {
            u64 lane_cell = cell(pass), cell = step * step_h + lane_cell;
            const float* memory_before = step > 0 ? memories + (cell - step_h) : first_memory + lane_cell;
#pragma unroll
            for (int n = 0; n < EACH / 2; n++) to.fetch_16(PART(n), gates + cell * 4 + n * 8);
            to.fetch_16(PART(EACH / 2), memory_before);
            to.fetch_8(PART(EACH / 2 + 1), grad_y + cell);
        }
        to.close();
    }

    // Zeros behind the end of a lane: h, and in backward the gradients of the gates. No block waits for them.
    __device__ __forceinline__ void pad(u16* hs, int pass) const {
        u64 cell = this->cell(pass);
        for (int step = table.length[at(pass)]; step < lanes.steps; step++) *(uint2*)(hs + (u64)(step + 1) * step_h + cell) = make_uint2(0, 0);
    }
    __device__ __forceinline__ void pad_gates(u16* grads, u64 cell, int pass) const {
        for (int step = table.length[at(pass)]; step < lanes.steps; step++)
#pragma unroll
            for (int n = 0; n < EACH; n += 2) *(uint4*)(grads + ((u64)step * step_h + cell + n) * 4) = make_uint4(0, 0, 0, 0);
    }

    // The gradient of the initial h of one unit, where step -1 does not write it: a lane without steps passes on that of its last h, and an earlier
    // launch that goes on from here (`before`) adds what comes through the product.
    __device__ __forceinline__ void grad_first(float* grad_first_h, const float* grad_last_h, u64 cell, int before, int pass) const {
        if (table.length[at(pass)] == 0) grad_first_h[cell] = grad_last_h ? grad_last_h[cell] : 0.0f;
        else if (before) grad_first_h[cell] = 0.0f;
    }
};

// Backward of one unit, from the gradient of h: the gradients of its four sums, as two words, and of its memory; the bias adds the former up.
__device__ __forceinline__ void cell_backward(const Slopes& slopes, float dh, u32* words, float& dc, float (&bias)[4]) {
    float d[4], past;
    slopes.apply(dh, d, dc, past);
    words[0] = pack(d[0], d[1]), words[1] = pack(d[2], d[3]);
#pragma unroll
    for (int m = 0; m < 4; m++) bias[m] += d[m];
}

// The sum of `count` numbers in shared memory that are `apart`, in order: a thread's part of the gradient of the bias.
__device__ __forceinline__ float summed(const float* from, int count, int apart) {
    float sum = 0.0f;
    for (int n = 0; n < count; n++) sum += from[n * apart];
    return sum;
}
