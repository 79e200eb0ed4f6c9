// What the kernels for Hopper share: barriers and rings in shared memory, tiles that the copy engine brings, operands of
// wgmma, SwiGLU. Put in front of their text by hopper_source.py. HALF 1: 16-bit numbers are float16, not bfloat16.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    char opaque[128];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra passed;\n"
        "bra again;\n"
        "passed:\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At that of a block of the cluster. What it orders are reads of the tensor cores and writes of the copy engine, which
// have ended when it is called: a release over the cluster would flush the block's memory, 1,000 cycles a step.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 block) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier), "r"(block) : "memory");
}

// Where a ring of COUNT stages stands.
template <int COUNT>
struct RingOf {
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void load_tile(u32 target, const TensorMap* map, int k, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            target),
        "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void load_tile_to_both(u32 target, const TensorMap* map, int k, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(k), "r"(row), "r"(barrier), "h"((unsigned short)3) : "memory");
}

__device__ __forceinline__ u64 matrix_descriptor(u32 address) {  // rows of 128 bytes, swizzled, 8 of them 1,024 apart
    return ((u64)1 << 62) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 16) | ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ float gate(float g, float up) {
    float power, share;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * g));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + power));
    return g * share * up;
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}
