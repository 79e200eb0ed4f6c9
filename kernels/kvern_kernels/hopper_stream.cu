// y = x W^T for few rows of x on Hopper: what bounds it is reading W, so the memory must never wait.
//
// A block takes 64 x GROUPS rows of W and a piece of the inner dimension, and a ring in shared memory, most of what a
// multiprocessor has, is filled by the copy engine: BOXES x 128 bytes of each row a step, swizzled. One warp asks for W
// as soon as the block is there, which is before the kernel in front has ended (programmatic dependent launch): while
// norms and quantizations compute, the memory delivers up to 20 MB of what comes next. It asks for PACE steps at a time
// until that kernel has ended, enough to keep the memory busy, few enough that what the small kernel reads does not
// queue behind them. Another warp waits for that kernel, lets the next one in, and asks for x. A warp group for each 64
// rows of W multiplies: W is the left operand of wgmma, x [TOKENS, K] the right one.
//
// Without GATED the sums of each piece go to y [pieces, rows, columns] in float32, which the next operation adds up.
// With GATED, W holds gate and up; 8 rows of each alternate in shared memory, so that a thread has both of a column,
// and y [rows, columns] is silu(gate) * up in 16 bits.
//
// With BLOCKS, in E4M3, a scale belongs to a row and 128 columns, so that whatever makes 128 columns quantizes them and
// no kernel has to look at whole rows in between. Without GATED they are scales of x: 128 columns are a box, whose
// products are made apart and scaled while they are added up. With GATED, where 4 groups make 128 columns, they are
// scales of y, which is then in E4M3. Scales lie block by block, TOKENS rows side by side: a step's are one line.
//
// Compiled by NVRTC (hopper_stream.py) for sm_90a with KIND (0 bfloat16, 1 E4M3, 2 float16), GATED, BLOCKS, GROUPS,
// BOXES, STAGES and PACE as numbers; TOKENS rows of x are written out in the text.

#define BOX_BYTES 128            // of a row, a box
#define W_BOX (64 * GROUPS * BOX_BYTES)
#define X_BOX (TOKENS * BOX_BYTES)
#define W_BYTES (W_BOX * BOXES)
#define X_BYTES (X_BOX * BOXES)
#define STAGE_BYTES (W_BYTES + X_BYTES)
#define BOX_ELEMENTS (KIND == 1 ? BOX_BYTES : BOX_BYTES / 2)
#define SCALED_X (BLOCKS && !GATED)
#define SCALED_Y (BLOCKS && GATED)
#define SCALE_BYTES (TOKENS * BOXES * 4)  // of x, a step
#define EXTRA_BYTES (SCALED_X ? STAGES * SCALE_BYTES : SCALED_Y ? TOKENS * (BOX_BYTES + 8) : 0)  // behind the ring

using Ring = RingOf<STAGES>;

__device__ __forceinline__ void store_flag(u32 flag, u32 value) {
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ bool load_flag(u32 flag) {
    u32 value;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(flag) : "memory");
    return value != 0;
}

__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Weights are read once a step: they need not stay in L2.
__device__ __forceinline__ void load_w(u32 target, const TensorMap* map, int step, int tile, u32 barrier, u64 policy) {
#pragma unroll
    for (int box = 0; box < BOXES; box++) {
#if GATED
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(target + box * W_BOX),
            "l"(map), "r"((step * BOXES + box) * BOX_ELEMENTS), "r"(0), "r"(tile * 4 * GROUPS), "r"(barrier), "l"(policy)
            : "memory");
#else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target + box * W_BOX),
            "l"(map), "r"((step * BOXES + box) * BOX_ELEMENTS), "r"(tile * 64 * GROUPS), "r"(barrier), "l"(policy)
            : "memory");
#endif
    }
}

__device__ __forceinline__ void load_x(u32 target, const TensorMap* map, int step, u32 barrier) {
#pragma unroll
    for (int box = 0; box < BOXES; box++)
        load_tile(target + box * X_BOX, map, (step * BOXES + box) * BOX_ELEMENTS, 0, barrier);
}

// A step's scales of x, to where the ring's stage has them; a lane arrives at the barrier when its part is there. Not by
// the copy engine: threads read them, not the tensor cores, and what it wrote was seen to change under such reads.
__device__ __forceinline__ void load_scales(u32 target, const float* scales, int step, u32 barrier, int lane) {
#pragma unroll
    for (int at = 0; at < SCALE_BYTES; at += 32 * 16)
        if (at + lane * 16 < SCALE_BYTES)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + at + lane * 16),
                         "l"(scales + step * BOXES * TOKENS + at / 4 + lane * 4) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// 64 x TOKENS += (32 bytes of each of 64 rows of W) x (32 bytes of each row of x)^T; `more` 0: =
__device__ __forceinline__ void multiply(float (&d)[TOKENS / 2], u64 w, u64 x, int more) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %@MORE@, 0;\n"
#if KIND == 0
        "wgmma.mma_async.sync.aligned.m64n@TOKENS@k16.f32.bf16.bf16 {@NAMES@}, %@W@, %@X@, p, 1, 1, 0, 0;\n"
#elif KIND == 1
        "wgmma.mma_async.sync.aligned.m64n@TOKENS@k32.f32.e4m3.e4m3 {@NAMES@}, %@W@, %@X@, p, 1, 1;\n"
#else
        "wgmma.mma_async.sync.aligned.m64n@TOKENS@k16.f32.f16.f16 {@NAMES@}, %@W@, %@X@, p, 1, 1, 0, 0;\n"
#endif
        "}"
        : @OPERANDS@
        : "l"(w), "l"(x), "r"(more));
}

__device__ __forceinline__ unsigned short rounded(float value, int half) {
    unsigned short bits;
    if (half)
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#if SCALED_X
// Products in flight are written behind the compiler's back: what reads them stays behind the wait, and what writes
// them again behind what reads them.
__device__ __forceinline__ void keep_order(float (&d)[TOKENS / 2]) {
#pragma unroll
    for (float& one : d) asm volatile("" : "+f"(one)::"memory");
}

// The products of one box. `d` holds those of another one before.
__device__ __forceinline__ void multiply_box(float (&d)[TOKENS / 2], u64 w, u64 x) {
    keep_order(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int part = 0; part < BOX_BYTES / 32; part++) multiply(d, w + 2 * part, x + 2 * part, part);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// sum += the products of a box times its scales, [TOKENS] in shared memory, once at most LEFT boxes are in flight.
template <int LEFT>
__device__ __forceinline__ void add_box(float (&sum)[TOKENS / 2], float (&d)[TOKENS / 2], u32 scales, int lane) {
    float by[TOKENS / 4];
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++)
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(by[2 * j]), "=f"(by[2 * j + 1])
                     : "r"(scales + (j * 8 + lane % 4 * 2) * 4) : "memory");
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    keep_order(d);
#pragma unroll
    for (int k = 0; k < TOKENS / 2; k++) sum[k] += d[k] * by[k / 4 * 2 + k % 2];
}

// sum += the products of a step, each box scaled while the next one is multiplied.
__device__ __forceinline__ void add_step(float (&sum)[TOKENS / 2], float (&d)[2][TOKENS / 2], u64 w, u64 x, u32 scales,
                                         int lane) {
    multiply_box(d[0], w, x);
#pragma unroll
    for (int box = 1; box < BOXES; box++) {
        multiply_box(d[box % 2], w + box * (W_BOX >> 4), x + box * (X_BOX >> 4));
        add_box<1>(sum, d[(box - 1) % 2], scales + (box - 1) * TOKENS * 4, lane);
    }
    add_box<0>(sum, d[(BOXES - 1) % 2], scales + (BOXES - 1) * TOKENS * 4, lane);
}
#endif

#if SCALED_Y
#define TILE_COLUMNS (32 * GROUPS)
static_assert(TILE_COLUMNS == BOX_BYTES, "a block makes the columns of one scale");

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory"); }

// Where a row's number of a column lies: in 16 bytes that are in another order in every second row, so that the rows of
// a warp do not meet in the memory's banks.
__device__ __forceinline__ u32 tile_place(int row, int column) {
    return row * TILE_COLUMNS + ((column / 16 ^ row / 2 % 8) * 16 | column % 16);
}

__device__ __forceinline__ float load_scale(u32 largest) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(largest) : "memory");
    return fmaxf(value * (1.0f / 448.0f), 1e-12f);
}

__device__ __forceinline__ float reciprocal(float value) {
    float found;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(value));
    return found;
}

// Into `largest` [TOKENS] the largest of each row, of which a thread has those of one column in `value`. Two rows at a
// time: lanes that differ in the lowest bit of their column swap one row for the other.
__device__ __forceinline__ void find_largest(const float (&value)[TOKENS / 4], u32 largest, int lane) {
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        float even = fabsf(value[2 * j]), odd = fabsf(value[2 * j + 1]);
        int other = lane & 4;
        float found = fmaxf(other ? odd : even, __shfl_xor_sync(0xffffffff, other ? even : odd, 4));
        found = fmaxf(found, __shfl_xor_sync(0xffffffff, found, 8));
        found = fmaxf(found, __shfl_xor_sync(0xffffffff, found, 16));
        if (lane < 8)
            asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(largest + (j * 8 + lane % 4 * 2 + lane / 4) * 4),
                         "r"(__float_as_uint(found)) : "memory");
    }
}

// The tile's rows in E4M3 to `y`, which begins at its columns, and their scales. `memory` holds the tile and, behind
// it, room for the largest of each row, twice: what `flip` says is zero, the other one is made so for the next tile.
__device__ __forceinline__ void store_quantized(const float (&value)[TOKENS / 4], u32 memory, int flip, int lane,
                                                int column, char* y, float* scales, int rows, int stride) {
    u32 largest = memory + TOKENS * (TILE_COLUMNS + flip * 4), next = memory + TOKENS * (TILE_COLUMNS + 4 - flip * 4);
    find_largest(value, largest, lane);
    meet();
    if (threadIdx.x < TOKENS) {
        scales[threadIdx.x] = load_scale(largest + threadIdx.x * 4);
        store_flag(next + threadIdx.x * 4, 0);
    }
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        int row = j * 8 + lane % 4 * 2;
        float even = value[2 * j] * reciprocal(load_scale(largest + row * 4));
        float odd = value[2 * j + 1] * reciprocal(load_scale(largest + row * 4 + 4));
        unsigned short both;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(odd), "f"(even));
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(memory + tile_place(row, column)), "h"(both) : "memory");
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(memory + tile_place(row + 1, column)),
                     "h"(static_cast<unsigned short>(both >> 8)) : "memory");
    }
    meet();
    for (int index = threadIdx.x; index < rows * (TILE_COLUMNS / 16); index += GROUPS * 128) {
        int row = index / (TILE_COLUMNS / 16), first = index % (TILE_COLUMNS / 16) * 16;
        uint4 numbers;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(numbers.x), "=r"(numbers.y), "=r"(numbers.z), "=r"(numbers.w)
                     : "r"(memory + tile_place(row, first)) : "memory");
        *reinterpret_cast<uint4*>(y + (long long)row * stride + first) = numbers;
    }
}
#endif

// Where a block stands: piece after piece of its items, step after step of the inner dimension.
struct Place {
    int item, step, end;
};

__device__ __forceinline__ Place begin(int item, int tiles, int items, int steps, int each) {
    int first = item / tiles * each;
    return {item, first, item < items ? min(first + each, steps) : first};
}

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 64, 1)
    hopper_stream(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, void* y, int rows,
                  int columns, int tiles, int items, int steps, int each, int half, const float* scale,
                  const float* row_scales, const float* column_scales, float* block_scales) {
    extern __shared__ char dynamic[];
    u32 base = (shared_address(dynamic) + 1023) & ~1023u;
    u32 extra = base + STAGES * STAGE_BYTES;
    u32 w_full = extra + EXTRA_BYTES, x_full = w_full + 8 * STAGES;
    u32 empty = x_full + 8 * STAGES, waited = empty + 8 * STAGES;
    int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        store_flag(waited, 0);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(w_full + 8 * stage, 1);
            barrier_init(x_full + 8 * stage, SCALED_X ? 1 + 32 : 1);
            barrier_init(empty + 8 * stage, GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#if SCALED_Y
    if (threadIdx.x < 2 * TOKENS) store_flag(extra + TOKENS * TILE_COLUMNS + threadIdx.x * 4, 0);
#endif
    __syncthreads();

    if (warp >= GROUPS * 4) {
        bool weights = warp == GROUPS * 4, alone = weights;
        if (lane > 0 && (weights || !SCALED_X)) return;
        u64 policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        if (!weights) {
            wait_for_previous();
            release_next();
            if (lane == 0) store_flag(waited, 1);
        }
        Ring ring{0, 0}, behind{0, 0};
        int asked = 0;
        for (Place at = begin(blockIdx.x, tiles, items, steps, each); at.step < at.end;
             at = begin(at.item + gridDim.x, tiles, items, steps, each)) {
            for (int step = at.step; step < at.end; step++, asked++, ring.advance()) {
                u32 target = base + ring.stage * STAGE_BYTES;
                if (asked >= STAGES) barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
                if (!weights) {
                    if (lane == 0) {
                        barrier_expect(x_full + 8 * ring.stage, X_BYTES);
                        load_x(target + W_BYTES, &x_map, step, x_full + 8 * ring.stage);
                    }
#if SCALED_X
                    load_scales(extra + ring.stage * SCALE_BYTES, block_scales, step, x_full + 8 * ring.stage, lane);
#endif
                    continue;
                }
                if (alone && asked >= PACE) {
                    alone = !load_flag(waited);
                    if (alone) barrier_wait(w_full + 8 * behind.stage, behind.parity);
                    behind.advance();
                }
                barrier_expect(w_full + 8 * ring.stage, W_BYTES);
                load_w(target, &w_map, step, at.item % tiles, w_full + 8 * ring.stage, policy);
            }
        }
#if SCALED_X
        asm volatile("cp.async.wait_all;" ::: "memory");
#endif
        return;
    }

    // Scales are read before the products, since behind them everything waits for what has to come from memory.
    float by = KIND == 1 ? *scale : 1.0f;
    wait_for_previous();
    int group = warp / 4, line = warp % 4 * 16 + lane / 4;  // of the group's 64 rows of W; the thread also has line + 8
#if GATED
    float row_by[TOKENS / 4];
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++) {
        int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
        row_by[i] = KIND == 1 && row < rows ? row_scales[row] * by : 1.0f;
    }
#endif
    Ring ring{0, 0};
#if SCALED_Y
    int flip = 0;
#endif
#if SCALED_X
    float in_flight[2][TOKENS / 2];
#endif
    float d[TOKENS / 2];
    for (Place at = begin(blockIdx.x, tiles, items, steps, each); at.step < at.end;
         at = begin(at.item + gridDim.x, tiles, items, steps, each)) {
        int piece = at.item / tiles, tile = at.item % tiles;
#if GATED
        int column = tile * 32 * GROUPS + group * 32 + warp % 4 * 8 + lane / 4;
        float gate_by = KIND == 1 && column_scales ? column_scales[column] : 1.0f;
        float up_by = KIND == 1 && column_scales ? column_scales[columns + column] : 1.0f;
#else
        int column = tile * 64 * GROUPS + group * 64 + line;
#endif
#if SCALED_X
#pragma unroll
        for (int k = 0; k < TOKENS / 2; k++) d[k] = 0.0f;
#else
        int before = -1;
#endif
        for (int step = at.step; step < at.end; step++) {
            barrier_wait(w_full + 8 * ring.stage, ring.parity);
            barrier_wait(x_full + 8 * ring.stage, ring.parity);
            u64 w = matrix_descriptor(base + ring.stage * STAGE_BYTES + group * 64 * BOX_BYTES);
            u64 x = matrix_descriptor(base + ring.stage * STAGE_BYTES + W_BYTES);
#if SCALED_X
            add_step(d, in_flight, w, x, extra + ring.stage * SCALE_BYTES, lane);
            __syncwarp();  // all lanes have read their scales
            if (lane == 0) barrier_arrive(empty + 8 * ring.stage);
#else
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int box = 0; box < BOXES; box++)
#pragma unroll
                for (int part = 0; part < BOX_BYTES / 32; part++)
                    multiply(d, w + box * (W_BOX >> 4) + 2 * part, x + box * (X_BOX >> 4) + 2 * part,
                             step - at.step + box + part);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (before >= 0) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (lane == 0) barrier_arrive(empty + 8 * before);
            }
            before = ring.stage;
#endif
            ring.advance();
        }
#if !SCALED_X
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) barrier_arrive(empty + 8 * before);
#endif

#if SCALED_Y
        float value[TOKENS / 4];
#pragma unroll
        for (int k = 0; k < TOKENS / 4; k++) {
            float first = d[k / 2 * 4 + k % 2], second = d[k / 2 * 4 + 2 + k % 2];
            value[k] = gate(first * row_by[k] * gate_by, second * row_by[k] * up_by);
        }
        int first_column = tile * TILE_COLUMNS;
        store_quantized(value, extra, flip, lane, column - first_column, static_cast<char*>(y) + first_column,
                        block_scales + tile * TOKENS, rows, columns);
        flip ^= 1;
#else
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = j * 8 + lane % 4 * 2 + i;
                if (row >= rows) continue;
                float first = d[4 * j + i], second = d[4 * j + 2 + i];
#if GATED
                float value = gate(first * row_by[2 * j + i] * gate_by, second * row_by[2 * j + i] * up_by);
                static_cast<unsigned short*>(y)[(long long)row * columns + column] = rounded(value, half);
#else
                float* target = static_cast<float*>(y) + ((long long)piece * rows + row) * columns + column;
                target[0] = first * by;
                target[8] = second * by;
#endif
            }
        }
#endif
    }
}
