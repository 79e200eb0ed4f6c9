// Rows of numbers summed over the GPUs of one engine, for few rows in one exchange: each rank writes its rows into the
// memory of the others and adds up what they write into its own. With a weight, the sum is added to the residual stream
// and normalized (RMSNorm) before anything is stored.
//
// A row is its own flag: what has not arrived reads as two negative zeros a word, which nobody sends (they are sent as
// positive ones). So an exchange costs one trip over NVLink, with no barrier and no flag. Of three slots one is written
// and read in this call; the one of the call before, which nobody writes before the next call has been answered, is
// emptied for the call after the next. `state` counts calls on the device, so that graphs of any shape can follow each
// other: all ranks make the same calls in the same order.
//
// A block computes a row. Blocks start in the order of their numbers and send before they wait, so that the first row
// that is missing anywhere is always one that some running block sends.
//
// Compiled by NVRTC (peer_sum.py) with RANKS, WIDTH (numbers a row), THREADS, HALF (1: float16, 0: bfloat16) and
// SLOT_BYTES (of one sender).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define EMPTY 0x80008000u
#define VECTORS (WIDTH / 8)  // of 16 bytes
#define TURNS ((VECTORS + THREADS - 1) / THREADS)

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
#if HALF
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high)
        : "r"(word));
#else
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
#endif
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

__device__ __forceinline__ void add_to(float (&sum)[8], const uint4& v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low, high;
        unpack(words[i], low, high);
        sum[2 * i] += low;
        sum[2 * i + 1] += high;
    }
}

__device__ __forceinline__ uint4 packed(const float (&v)[8]) {
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

__device__ __forceinline__ u32 without_negative_zeros(u32 word) {
    if ((word & 0xffffu) == 0x8000u) word &= 0xffff0000u;
    if ((word & 0xffff0000u) == 0x80000000u) word &= 0xffffu;
    return word;
}

__device__ __forceinline__ void send(u64 address, const uint4& v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ uint4 arrived(u64 address) {
    uint4 v;
    do {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(address)
                     : "memory");
    } while (v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY);
    return v;
}

// This rank's own numbers, in the model's type: `parts` float32 tensors added up, or one that has the type (0).
__device__ __forceinline__ uint4 own_share(const void* x, int parts, int part_stride, u64 start) {
    if (parts == 0) {
        uint4 v = *reinterpret_cast<const uint4*>(reinterpret_cast<const u16*>(x) + start);
        return make_uint4(without_negative_zeros(v.x), without_negative_zeros(v.y), without_negative_zeros(v.z),
                          without_negative_zeros(v.w));
    }
    float sum[8] = {};
    for (int part = 0; part < parts; part++) {
        const float4* from = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(x) + start +
                                                             (u64)part * (u32)part_stride);
        float4 a = from[0], b = from[1];
        sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
        sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
    }
    uint4 v = packed(sum);
    return make_uint4(without_negative_zeros(v.x), without_negative_zeros(v.y), without_negative_zeros(v.z),
                      without_negative_zeros(v.w));
}

__device__ __forceinline__ float sum_of_block(float value) {
    __shared__ float of_warps[THREADS / 32];
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < THREADS / 32; warp++) total += of_warps[warp];
    return total;
}

// state: calls made, bytes a sender wrote in the last call, blocks of this call that have begun.
extern "C" __global__ void __launch_bounds__(THREADS)
    peer_sum(const void* x, int parts, int part_stride, int x_stride, u16* residual, int residual_stride,
             const u16* weight, u16* out, int out_stride, const u64* buffers, int rank, u32* state, float eps) {
    const u64 row = blockIdx.x;
    wait_for_previous();
    const u32 call = *reinterpret_cast<volatile u32*>(state), used = *reinterpret_cast<volatile u32*>(state + 1);
    const u32 slot = call % 3, before = (call + 2) % 3;
    const u64 in_slot = row * (WIDTH * 2);

    uint4 own[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int vector = turn * THREADS + threadIdx.x;
        if (vector < VECTORS) own[turn] = own_share(x, parts, part_stride, row * (u32)x_stride + 8 * vector);
    }
#pragma unroll
    for (int peer = 0; peer < RANKS; peer++) {
        if (peer == rank) continue;
        const u64 sender = rank < peer ? rank : rank - 1;
        const u64 target = buffers[peer] + (slot * (RANKS - 1) + sender) * (u64)SLOT_BYTES + in_slot;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const int vector = turn * THREADS + threadIdx.x;
            if (vector < VECTORS) send(target + 16 * vector, own[turn]);
        }
    }
    __syncthreads();  // all threads have read the state
    if (threadIdx.x == 0 && atomicAdd(state + 2, 1u) == gridDim.x - 1) {
        state[1] = gridDim.x * (WIDTH * 2);
        state[2] = 0;
        __threadfence();
        state[0] = call + 1;
    }
    release_next();

    const u64 mine = buffers[rank];
    for (int sender = 0; sender < RANKS - 1; sender++) {
        const u64 old = mine + (before * (RANKS - 1) + sender) * (u64)SLOT_BYTES;
        for (u64 at = 16 * (row * THREADS + threadIdx.x); at < used; at += 16 * (u64)gridDim.x * THREADS) {
            *reinterpret_cast<uint4*>(old + at) = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
        }
    }

    uint4 kept[TURNS];
    float squares = 0.0f;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int vector = turn * THREADS + threadIdx.x;
        if (vector >= VECTORS) continue;
        uint4* stream = reinterpret_cast<uint4*>(residual + row * (u32)residual_stride) + vector;
        uint4 left = make_uint4(0, 0, 0, 0);
        if (weight != nullptr) left = *stream;
        float sum[8] = {};
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++) {  // in the same order everywhere: the same bits on every rank
            const u64 sender = peer < rank ? peer : peer - 1;
            const u64 from = mine + (slot * (RANKS - 1) + sender) * (u64)SLOT_BYTES + in_slot + 16 * vector;
            add_to(sum, peer == rank ? own[turn] : arrived(from));
        }
        if (weight != nullptr) add_to(sum, left);
        kept[turn] = packed(sum);
        if (weight == nullptr) {
            reinterpret_cast<uint4*>(out + row * (u32)out_stride)[vector] = kept[turn];
            continue;
        }
        *stream = kept[turn];
        float rounded[8] = {};  // before it is squared, as where it is stored and read back
        add_to(rounded, kept[turn]);
#pragma unroll
        for (int i = 0; i < 8; i++) squares += rounded[i] * rounded[i];
    }
    if (weight == nullptr) return;
    const float scale = rsqrtf(sum_of_block(squares) / WIDTH + eps);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int vector = turn * THREADS + threadIdx.x;
        if (vector >= VECTORS) continue;
        float value[8] = {}, factor[8] = {};
        add_to(value, kept[turn]);
        add_to(factor, reinterpret_cast<const uint4*>(weight)[vector]);
#pragma unroll
        for (int i = 0; i < 8; i++) value[i] *= scale * factor[i];
        reinterpret_cast<uint4*>(out + row * (u32)out_stride)[vector] = packed(value);
    }
}
