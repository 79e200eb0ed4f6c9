// y = x W^T for long prompts on Hopper: x [M, K] and W [N, K] in bfloat16 or E4M3, y in bfloat16.
//
// What it does that the vendor's kernels do not: with GATED, W holds gate and up (N = 2 F), and y [M, F] is
// silu(gate) * up, so that neither is ever written; with ADD, the product is added to what y holds.
//
// Two blocks form a cluster that computes 256 x 256 of the product, 128 rows each. A block loads its rows of x and half
// of the cluster's rows of W, which the tensor memory accelerator writes to both blocks: 32 KB a step of 64 numbers (128
// in E4M3) from L2 instead of 48. A warp group of a block feeds a ring of 4 such steps in shared memory, two others
// multiply (64 x 256 each, 128 registers a thread), and blocks stay for tile after tile, so that the ring is full again
// when a tile has been written. The result leaves through shared memory (tensor memory accelerator, 128-byte swizzle).
//
// Compiled by NVRTC (hopper_product.py) for sm_90a with FP8, GATED and ADD as 0 or 1.

#define ROWS 128                 // of x, a block
#define COLUMNS 256              // of the product, a cluster
#define STEP_BYTES 128           // of a row, a step
#define STAGES 4
#define X_BYTES (ROWS * STEP_BYTES)
#define W_BYTES (COLUMNS * STEP_BYTES)
#define STAGE_BYTES (X_BYTES + W_BYTES)
#define OUT_BYTES 16384          // 64 x 128 bfloat16 of a consumer warp group
#define CONSUMER_WARPS 8
#ifndef GROUP
#define GROUP 8                  // pairs of row tiles that are swept together: x of them stays in L2
#endif

__device__ __forceinline__ void store_tile(const TensorMap* map, int column, int row, u32 source) {
#if ADD
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                     map),
                 "r"(column), "r"(row), "r"(source) : "memory");
#else
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(source) : "memory");
#endif
}

// 64 x 256 += (32 bytes of each of 64 rows) x (32 bytes of each of 256 rows)^T; `more` 0: =
__device__ __forceinline__ void multiply(float (&d)[128], u64 x, u64 w, int more) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
#if FP8
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 "
#else
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
#endif
        "{@NAMES@}, %128, %129, p, 1, 1"
#if !FP8
        ", 0, 0"
#endif
        ";\n"
        "}"
        : @OPERANDS@
        : "l"(x), "l"(w), "r"(more));
}

struct Tile {
    int row, column;  // the block's first row; the cluster's first column of what is stored
};

__device__ __forceinline__ Tile tile_at(int number, int row_pairs, int column_tiles, u32 rank) {
    int group = number / (GROUP * column_tiles), first = group * GROUP;
    int pairs = min(row_pairs - first, GROUP), place = number - group * GROUP * column_tiles;
    Tile tile;
    tile.row = (first + place % pairs) * 2 * ROWS + (int)rank * ROWS;
    tile.column = place / pairs * (GATED ? COLUMNS / 2 : COLUMNS);
    return tile;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    hopper_product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                   const __grid_constant__ TensorMap y_map, int rows, int row_pairs, int column_tiles, int steps,
                   int second_half,  // rows of W behind a tile's first row at which the cluster's second block loads
                   const float* row_scales, const float* scale) {
    extern __shared__ char dynamic[];
    u32 base = (shared_address(dynamic) + 1023) & ~1023u;
    u32 out_base = base + STAGES * STAGE_BYTES, barriers = out_base + 2 * OUT_BYTES;
    // barriers: full[STAGES], then empty[STAGES], 8 bytes each
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    int clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
    int tiles = row_pairs * column_tiles;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(barriers + 8 * stage, 1);
            barrier_init(barriers + 8 * (STAGES + stage), 2 * CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            int stage = 0;
            u32 parity = 0;
            for (int number = cluster; number < tiles; number += clusters) {
                Tile tile = tile_at(number, row_pairs, column_tiles, rank);
                int w_row = tile.column + (int)rank * second_half;
                for (int step = 0; step < steps; step++) {
                    u32 full = barriers + 8 * stage, x = base + stage * STAGE_BYTES, w = x + X_BYTES;
                    int k = step * (FP8 ? STEP_BYTES : STEP_BYTES / 2);
                    barrier_wait(barriers + 8 * (STAGES + stage), parity ^ 1);
                    barrier_expect(full, STAGE_BYTES);
                    load_tile(x, &x_map, k, tile.row, full);
                    load_tile_to_both(w + rank * (W_BYTES / 2), &w_map, k, w_row, full);
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int group = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);  // the compiler sees that it is uniform
        int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
        int line = thread / 32 * 16 + lane / 4;  // of the group's 64; the thread also has line + 8
        u32 out = out_base + group * OUT_BYTES;
        u32 spot = out + line * 128 + (lane & 3) * 4;
        int stage = 0;
        u32 parity = 0;
        float d[128];
        for (int number = cluster; number < tiles; number += clusters) {
            Tile tile = tile_at(number, row_pairs, column_tiles, rank);
            int before = 0;
            for (int step = 0; step < steps; step++) {
                barrier_wait(barriers + 8 * stage, parity);
                u64 x = matrix_descriptor(base + stage * STAGE_BYTES + group * (X_BYTES / 2));
                u64 w = matrix_descriptor(base + stage * STAGE_BYTES + X_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int part = 0; part < STEP_BYTES / 32; part++) multiply(d, x + 2 * part, w + 2 * part, step + part);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (step > 0) {
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (lane < 2) barrier_arrive(barriers + 8 * (STAGES + before), lane);
                }
                before = stage;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (lane < 2) barrier_arrive(barriers + 8 * (STAGES + before), lane);

            int row = tile.row + group * 64;
            float first_scale = 1.0f, second_scale = 1.0f;
            if (FP8) {
                first_scale = second_scale = *scale;
                if (GATED) {
                    if (row + line < rows) first_scale *= row_scales[row + line];
                    if (row + line + 8 < rows) second_scale *= row_scales[row + line + 8];
                }
            }
#pragma unroll
            for (int half = 0; half < (GATED ? 1 : 2); half++) {
                if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
#pragma unroll
                for (int j = 0; j < 16; j++) {
                    float v[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float by = i < 2 ? first_scale : second_scale;
                        if (GATED) {
                            float g = d[4 * j + i], up = d[64 + 4 * j + i];
                            v[i] = FP8 ? gate(g * by, up * by) : gate(g, up);
                        } else {
                            v[i] = FP8 ? d[64 * half + 4 * j + i] * by : d[64 * half + 4 * j + i];
                        }
                    }
                    u32 target = spot + j / 8 * 8192 + ((j % 8) ^ (lane / 4)) * 16;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(pack(v[0], v[1])) : "memory");
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(target + 1024), "r"(pack(v[2], v[3])) : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                if (thread == 0 && row < rows) {
                    int column = tile.column + half * 128;
                    store_tile(&y_map, column, row, out);
                    store_tile(&y_map, column + 64, row, out + 8192);
                    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                }
            }
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __syncwarp();
    }
    // Neither block may end while the other one still writes to its shared memory or signals its barriers.
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
