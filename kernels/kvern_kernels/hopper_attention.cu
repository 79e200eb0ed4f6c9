// Causal attention of prompts over the paged KV cache on Hopper: heads of 128 numbers in bfloat16 or float16.
//
// A block takes 128 query tokens of one head and walks the context from the last tile of 128 tokens they see to the
// first, so that only the first tiles need masks. One warp feeds two rings of two tiles each, K and V, by the copy
// engine, straight from the cache's blocks; two warp groups of 64 query tokens multiply. A group asks for the next
// tile's scores before it asks for this tile's share of the output, and computes the softmax of the former while the
// tensor cores work at the latter; the groups take turns at asking, so that one's softmax falls into the other's
// products (FlashAttention-3, arXiv 2407.08608). Blocks stay for item after item, in the order that the host has dealt
// them (`deal` in hopper_attention.py), and go from one to the next as from tile to tile: the scores of the next one
// are computed while this one's output is finished and written.
//
// Where an even number of heads reads each KV head, two blocks form a cluster (SHARED 1) that takes two of those heads:
// each loads half of every tile of K and V, which the copy engine writes to both. Boxes of 16 tokens are what bounds a
// block that loads alone.
//
// Compiled by NVRTC (hopper_attention.py) for sm_90a with HALF 1 for float16, BLOCK, the tokens of a cache block, and
// SHARED.

#define ROWS 128                 // query tokens of a tile, 64 a group
#define KEYS 128                 // context tokens of a tile
#define STAGES 2
#define BOX (BLOCK < KEYS ? BLOCK : KEYS)
#define BOXES (KEYS / BOX)       // of a tile of V; of K twice as many, each of 64 columns
#define HALF_BYTES (KEYS * 128)  // 64 columns of a tile
#define BLOCKS (1 + SHARED)      // of a cluster
#define TILE_BYTES (2 * HALF_BYTES)
#define CONSUMER_WARPS 8

using Ring = RingOf<STAGES>;

// At that of each block of the cluster, a lane for each.
__device__ __forceinline__ void barrier_arrive_at_all(u32 barrier, int lane) {
#if SHARED
    if (lane < 2) barrier_arrive(barrier, lane);
#else
    if (lane == 0) barrier_arrive(barrier);
#endif
}

#if SHARED
#define TO_ALL ".multicast::cluster"
#define WHOM ", %5"
#define MASK , "h"((unsigned short)3)
#else
#define TO_ALL
#define WHOM
#define MASK
#endif

// 64 columns of a box of tokens
__device__ __forceinline__ void load_keys(u32 target, const TensorMap* map, int column, int row, u32 barrier) {
#if SHARED
    load_tile_to_both(target, map, column, row, barrier);
#else
    load_tile(target, map, column, row, barrier);
#endif
}

// All columns of a box of tokens, 64 behind the other 64
__device__ __forceinline__ void load_values(u32 target, const TensorMap* map, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes" TO_ALL
                 " [%0], [%1, {%2, %3, %2}], [%4]" WHOM ";" ::"r"(target),
                 "l"(map), "r"(0), "r"(row), "r"(barrier) MASK : "memory");
}

#if HALF
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif

// 64 x 128 (+)= 16 columns of 64 queries times the same of 128 keys; `more` 0: =
__device__ __forceinline__ void multiply_keys(float (&d)[64], u64 q, u64 k, int more) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16." TYPES " {@NAMES@}, %64, %65, p, 1, 1, 0, 0;\n"
        "}"
        : @OPERANDS@
        : "l"(q), "l"(k), "r"(more));
}

// 64 x 128 (+)= the weights of 16 tokens, in registers, times their values, whose rows are the inner dimension
__device__ __forceinline__ void multiply_values(float (&d)[64], const u32* w, u64 v, int more) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16." TYPES " {@NAMES@}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
        "}"
        : @OPERANDS@
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(v), "r"(more));
}

// Keeps the compiler from moving what it does with these registers across the products in flight.
template <int COUNT>
__device__ __forceinline__ void settle(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int COUNT>
__device__ __forceinline__ void settle(u32 (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// The assembler would move the softmax behind the wait for the products that it is meant to run beside: a store that
// needs `sum`, and never happens, since weights are not negative.
__device__ __forceinline__ void stay_before(float sum, u32 unused) {
    asm volatile(
        "{\n"
        ".reg .pred never;\n"
        "setp.lt.f32 never, %0, 0f00000000;\n"
        "@never st.shared.u32 [%1], 0;\n"
        "}" ::"f"(sum), "r"(unused) : "memory");
}

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void await_turn(int group) {
    asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}

__device__ __forceinline__ void pass_turn(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
}

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// V comes as [tokens, columns], the inner dimension of its product first: groups of 8 tokens are 1,024 bytes apart, the
// halves of 64 columns a box.
__device__ __forceinline__ u64 values_descriptor(u32 address) {
    return ((u64)1 << 62) | ((u64)(1024 >> 4) << 32) | ((u64)(BOX * 128 >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void ask_scores(float (&scores)[64], u32 queries, u32 keys) {
    u64 q = matrix_descriptor(queries), k = matrix_descriptor(keys);
#pragma unroll
    for (int part = 0; part < 8; part++) {
        int along = part / 4 * (HALF_BYTES >> 4) + part % 4 * 2;
        multiply_keys(scores, q + along, k + along, part);
    }
    commit();
}

__device__ __forceinline__ void ask_output(float (&output)[64], const u32 (&weights)[32], u32 values,
                                           int more) {
    u64 v = values_descriptor(values);
#pragma unroll
    for (int part = 0; part < 8; part++) {
        int token = 16 * part, along = token / BOX * 2 * BOX + token % BOX;
        multiply_values(output, weights + 4 * part, v + (along * 128 >> 4), part + more);
    }
    commit();
}

// What a thread knows of its two query tokens, 8 apart: how far they see, their scores' largest, their weights' sum.
struct Rows {
    int limit[2];
    float top[2], sum[2], decay[2];
};

// Scores of the context tokens from `first` on become weights 2^(scale score - top); `decay` is what earlier sums and
// outputs have to be multiplied by.
__device__ __forceinline__ void soften(float (&s)[64], Rows& rows, int first, bool masked, float scale, int lane) {
    if (masked) {
#pragma unroll
        for (int i = 0; i < 64; i++) {
            int token = first + i / 4 * 8 + (lane & 3) * 2 + i % 2;
            if (token >= rows.limit[i / 2 % 2]) s[i] = -infinity();
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = rows.top[r];
#pragma unroll
        for (int i = 0; i < 16; i++) top = fmaxf(top, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
        float base = top == -infinity() ? 0.0f : top * scale;  // a row may see nothing of the first tile
        rows.decay[r] = power_of_two(rows.top[r] * scale - base);
        rows.top[r] = top;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& weight = s[4 * i + 2 * r + e];
                weight = power_of_two(fmaf(weight, scale, -base));
                sum += weight;
            }
        }
        rows.sum[r] = rows.sum[r] * rows.decay[r] + sum;
    }
}

__device__ __forceinline__ void round_weights(u32 (&weights)[32], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; i++) weights[i] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ int rank() {  // of the block in its cluster
    u32 number = 0;
#if SHARED
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(number));
#endif
    return (int)number;
}

// What a block computes: up to 128 query tokens of one head, or (`heads` 2) up to 64 of two, a group each.
struct Item {
    int token, row, seen, count;  // first query token; row of the batch; tokens that it sees; query tokens
    int length, head, heads;      // of the row's context; the first one of this block; how many
    __device__ __forceinline__ int key_tiles() const { return (seen + count - 2) / KEYS + 1; }
    __device__ __forceinline__ int head_of(int group) const { return head + (heads == 2 ? group : 0); }
    __device__ __forceinline__ int line_of(int group) const { return heads == 2 ? 0 : group * 64; }
};

// The items of each cluster, turn by turn; one that has no more has items without tokens.
struct Work {
    const int* items;
    int turns;

    __device__ __forceinline__ Item item(int turn) const {
        const int* found = items + 8 * (min(turn, turns - 1) * (gridDim.x / BLOCKS) + blockIdx.x / BLOCKS);
        int4 first = __ldg((const int4*)found);
        int4 second = __ldg((const int4*)found + 1);
        int count = turn < turns ? first.w : 0;
        return {first.x, first.y, first.z, count, second.x, second.y + second.z * rank(), second.z};
    }
};

struct Cache {
    const int* tables;
    int table_stride, rows;  // of 128 numbers; K of all heads is the first half
    int kv_heads, group;     // query heads that read each
};

// Where things are in shared memory: two tiles of a kind, and barriers of 8 bytes.
struct Places {
    u32 queries, keys, values, barriers;
    __device__ __forceinline__ u32 barrier(int kind, const Ring& ring) const {
        return barriers + 16 * kind + 8 * ring.stage;
    }
};

enum { Q_FULL, Q_EMPTY, K_FULL, K_EMPTY, V_FULL, V_EMPTY, V_LOADED, BARRIER_KINDS };

// V of tokens `valid`.. of a tile, up to the end of their box, becomes zero: the last block of a row may hold another
// row's tokens there, and a weight of 0 times a value that is no number would be none.
__device__ __forceinline__ void clear_values(u32 target, int valid, int lane) {
    target += valid / BOX * 2 * BOX * 128;
    for (int word = valid % BOX * 8 + lane; word < BOX * 8; word += 32)
#pragma unroll
        for (int half = 0; half < 2; half++)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(target + half * BOX * 128 + word * 16), "r"(0)
                         : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}

// The warp that feeds the rings: the queries of an item, then K of each tile, V one tile behind. Lanes of the first half
// load K, 64 columns of a box each, the others V; of a cluster's boxes each block loads its part.
__device__ __forceinline__ void feed(const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map,
                                     const Work& work, const Cache& cache, const Places& at, int lane) {
    Ring q = {0, 0}, k = {0, 0}, v = {0, 0};
    u32 loaded_parities = 0;
    int behind = lane / 16, part = behind ? lane % 16 * BLOCKS + rank() : rank() * (2 * BOXES / BLOCKS) + lane;
    int box = behind ? part : part / 2, half = part % 2;
    bool loads = behind ? part < BOXES : lane < 2 * BOXES / BLOCKS;
    int turn = 0;
    Item item = work.item(0);
    while (item.count) {
        int head = item.head, length = item.length, count = item.key_tiles();
        const int* table = cache.tables + (long long)item.row * cache.table_stride;
        int first_row = (head / cache.group + behind * cache.kv_heads) * (cache.rows / 2 / cache.kv_heads);
        // The cache row of this lane's box of a tile; none outside of the context, which reads as zeros.
        auto row_of = [&](int number) {
            int token = number * KEYS + box * BOX;
            if (!loads || token < 0 || token >= length) return cache.rows;
            return first_row + __ldg(table + token / BLOCK) * BLOCK + token % BLOCK;
        };
        int row = behind ? 0 : row_of(count - 1);
        barrier_wait(at.barrier(Q_EMPTY, q), q.parity ^ 1);
        if (lane == 0) {
            u32 full = at.barrier(Q_FULL, q), target = at.queries + q.stage * TILE_BYTES;
            barrier_expect(full, TILE_BYTES);
#pragma unroll
            for (int box = 0; box < 4; box++) {
                int group = box / 2, column = item.head_of(group) * 128 + box % 2 * 64;
                load_tile(target + box % 2 * HALF_BYTES + group * 64 * 128, q_map, column,
                             item.token + item.line_of(group), full);
            }
        }
        q.advance();
        item = work.item(++turn);
        for (int number = count - 1; number >= -1; number--) {
            int next = row_of(number - 1 + behind);
            if (number >= 0) {
                u32 full = at.barrier(K_FULL, k), target = at.keys + k.stage * TILE_BYTES;
                barrier_wait(at.barrier(K_EMPTY, k), k.parity ^ 1);
                if (lane == 0) barrier_expect(full, TILE_BYTES);
                __syncwarp();
                if (loads && !behind) load_keys(target + half * HALF_BYTES + box * BOX * 128, k_map, half * 64, row, full);
                k.advance();
            }
            if (number < count - 1) {
                u32 full = at.barrier(V_FULL, v), target = at.values + v.stage * TILE_BYTES;
                int valid = length - (number + 1) * KEYS;
                bool clears = valid < KEYS && valid % BOX != 0;
                u32 loaded = clears ? at.barrier(V_LOADED, v) : full;
                barrier_wait(at.barrier(V_EMPTY, v), v.parity ^ 1);
                if (lane == 0) barrier_expect(loaded, TILE_BYTES);
                __syncwarp();
                if (loads && behind) load_values(target + box * 2 * BOX * 128, v_map, row, loaded);
                if (clears) {
                    barrier_wait(loaded, loaded_parities >> v.stage & 1);
                    loaded_parities ^= 1 << v.stage;
                    clear_values(target, valid, lane);
                    if (lane == 0) barrier_arrive(full);
                }
                v.advance();
            }
            row = next;
        }
    }
}

// The output over the sum of its weights.
__device__ __forceinline__ void store(const float (&output)[64], const float (&sums)[2], const Item& item, void* out,
                                      int heads, int group, int line, int lane) {
    line += item.line_of(group);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = sums[r];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        float share = 1.0f / sum;
        if (line + 8 * r >= item.count) continue;
        u32* target = (u32*)out + ((long long)(item.token + line + 8 * r) * heads + item.head_of(group)) * 64 + (lane & 3);
#pragma unroll
        for (int i = 0; i < 16; i++)
            target[4 * i] = pack(output[4 * i + 2 * r] * share, output[4 * i + 2 * r + 1] * share);
    }
}

// A warp group: 64 query tokens of each item. Each time round it asks for the scores of a tile and for the output of the
// tile before, whose weights it has, in whichever items they are.
__device__ __forceinline__ void attend(void* out, const Work& work, const Places& at, int heads, float scale, int group,
                                       int lane) {
    int line = threadIdx.x % 128 / 32 * 16 + lane / 4;  // of the group's 64; the thread also has line + 8
    Ring q = {0, 0}, k = {0, 0}, v = {0, 0};
    float scores[64], output[64];
    u32 weights[32];
    int turn = 0;
    Item item = {}, next = work.item(0);
    Rows rows = {};
    int number = 0;       // of the tile whose weights are known
    int more = 0;         // whether the output has that of another one before it
    bool before = false;  // whether there is such a tile
    if (group == 1) pass_turn(group);
    while (true) {
        bool fresh = number == 0;  // what comes is another item's
        if (fresh && !next.count) break;
        float sums[2] = {rows.sum[0], rows.sum[1]};
        Item done = item;
        if (fresh) {
            item = next;
            next = work.item(++turn);
            number = item.key_tiles();
            int seen = item.seen + item.line_of(group) + line;
            rows = {{seen, seen + 8}, {-infinity(), -infinity()}, {0, 0}, {0, 0}};
            barrier_wait(at.barrier(Q_FULL, q), q.parity);
        }
        number--;
        barrier_wait(at.barrier(K_FULL, k), k.parity);
        await_turn(group);
        settle(scores);
        settle(output);
        settle(weights);
        fence();
        ask_scores(scores, at.queries + q.stage * TILE_BYTES + group * 64 * 128, at.keys + k.stage * TILE_BYTES);
        if (before) {
            barrier_wait(at.barrier(V_FULL, v), v.parity);
            ask_output(output, weights, at.values + v.stage * TILE_BYTES, more);
            pass_turn(group);
            wait<1>();
        } else {
            pass_turn(group);
            wait<0>();
        }
        settle(scores);
        barrier_arrive_at_all(at.barrier(K_EMPTY, k), lane);
        k.advance();
        if (number == 0) {
            if (lane == 0) barrier_arrive(at.barrier(Q_EMPTY, q));
            q.advance();
        }
        soften(scores, rows, number * KEYS, number >= (item.seen + item.line_of(group)) / KEYS, scale, lane);
        stay_before(rows.sum[0] + rows.sum[1], at.barriers);
        wait<0>();
        settle(output);
        settle(weights);
        if (before) {
            barrier_arrive_at_all(at.barrier(V_EMPTY, v), lane);
            v.advance();
            if (fresh) store(output, sums, done, out, heads, group, line, lane);
        }
        if (!fresh && __any_sync(0xffffffff, rows.decay[0] != 1.0f || rows.decay[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < 64; i++) output[i] *= rows.decay[i / 2 % 2];
        }
        more = !fresh;
        before = true;
        round_weights(weights, scores);
    }
    if (!before) return;
    barrier_wait(at.barrier(V_FULL, v), v.parity);
    settle(output);
    settle(weights);
    fence();
    ask_output(output, weights, at.values + v.stage * TILE_BYTES, more);
    wait<0>();
    settle(output);
    barrier_arrive_at_all(at.barrier(V_EMPTY, v), lane);
    store(output, rows.sum, item, out, heads, group, line, lane);
}

#if SHARED
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

__device__ __forceinline__ void meet() {  // all threads of the cluster
#if SHARED
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
}

extern "C" __global__ void CLUSTER __launch_bounds__(384, 1)
    hopper_attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                     const __grid_constant__ TensorMap v_map, void* out, const int* items, const int* tables, int turns,
                     int heads, int kv_heads, int table_stride, int cache_rows, float scale) {
    extern __shared__ char dynamic[];
    Places at;
    at.queries = (shared_address(dynamic) + 1023) & ~1023u;
    at.keys = at.queries + 2 * TILE_BYTES;
    at.values = at.keys + STAGES * TILE_BYTES;
    at.barriers = at.values + STAGES * TILE_BYTES;
    Work work = {items, turns};
    Cache cache = {tables, table_stride, cache_rows, kv_heads, heads / kv_heads};
    if (threadIdx.x == 0) {
        for (int kind = 0; kind < BARRIER_KINDS; kind++) {
            int arrivals = kind == Q_EMPTY ? CONSUMER_WARPS
                           : kind == K_EMPTY || kind == V_EMPTY ? BLOCKS * CONSUMER_WARPS
                                                                : 1;
            for (int stage = 0; stage < STAGES; stage++) barrier_init(at.barriers + 16 * kind + 8 * stage, arrivals);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet();
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x < 32) feed(&q_map, &k_map, &v_map, work, cache, at, lane);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        int group = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);  // the compiler sees that it is uniform
        attend(out, work, at, heads, scale, group, lane);
    }
    meet();  // no block may end while the other one still writes to its shared memory or signals its barriers
}
