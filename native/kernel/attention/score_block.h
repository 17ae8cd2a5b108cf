/* SPDX-License-Identifier: Apache-2.0
 * The groups of 16 keys that a score block is made of: where they lie, and what is fetched of those that come next.
 * Parameters: those of state.h, which includes it. */

/* Where the keys end that the thread of this task will look at. */
static int64_t keys_end(const ca_plan *plan, const ca_task *task) {
    int64_t begin, end;
    ca_task_keys(plan, task, &begin, &end);
    if (task->partial >= 0)
        end = ca_min64(end, (task->segment + task->num_segments) * ca_segment_keys(plan->seq_lens[task->request]));
    return end;
}

/* Where a key lies among the blocks that count. */
typedef struct place {
    int64_t which, block, key;
} place;
static place place_of(ca_blocks blocks, int64_t size, int64_t key) {
    const int64_t which = ca_find_block(blocks, key / size), block = ca_nth_block(blocks, which);
    return (place){which, block, ca_max64(key, block * size)};
}
/* The one n keys on, or where its block ends. */
static place next_place(ca_blocks blocks, int64_t size, place p, int64_t n) {
    p.key += n;
    if (p.key < (p.block + 1) * size)
        return p;
    p.block = ca_nth_block(blocks, ++p.which);
    p.key = p.block * size;
    return p;
}

/* A key's row of K, or of V. */
static const char *row_at(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int value,
                          place p) {
    const int64_t block = ca_block_of(call, task->request, p.block);
    const int64_t token = p.key - p.block * call->block_size;
    const int64_t ld = value ? call->v_ld : call->k_ld;
    return ca_kv_block(plan, call, value, block, kv_head) +
           token * ld * ca_dtype_size(ca_kv_dtype(&plan->shape, value));
}

#define COPIED_AHEAD 64 /* keys whose rows are fetched while one's is copied; 32: 1.2 times the time */
/* list_groups of a plain cache whose blocks hold no whole groups, in `room`: a group has the keys from a multiple of 16
 * to the next one, as far as they follow one another; 0 for those before k0 and from k1 on, which no row sees. Against
 * groups of what lies in one block, Zen 4, one thread, NHD / HND: of 1 token 0.10 / 0.13 of the time of decode and 0.08
 * of that of chunks of 64, of 8 tokens 0.31 / 0.50 and 0.6 / 0.5, of 24 0.48 / 0.64 and 0.9 / 0.7; then as long as over
 * blocks of 128 in chunks, 1.6 / 1.3 to 2.4 times in decode. */
static int copy_groups(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int64_t k0,
                       int64_t k1, int most, char *room, group *g, int64_t *end) {
    const ca_blocks blocks = ca_blocks_of(call, task->request, kv_head);
    const ca_shape *s = &plan->shape;
    const int64_t bytes[2] = {s->head_size * ca_dtype_size(s->k_dtype), s->head_size_v * ca_dtype_size(s->v_dtype)};
    place at = place_of(blocks, call->block_size, k0), ahead = place_of(blocks, call->block_size, k0 + COPIED_AHEAD);
    const int64_t past = keys_end(plan, task);
    int n = 0;
    for (; n < most && at.key < k1; n++) {
        char *copy[2] = {room + n * CA_LANES * bytes[0], room + KEYS * bytes[0] + n * CA_LANES * bytes[1]};
        const int64_t first = at.key == k0 ? at.key - at.key % CA_LANES : at.key;
        const int64_t last = ca_min64(k1, at.key - at.key % CA_LANES + CA_LANES);
        int64_t there = at.key - first;
        EACH(value, 2) memset(copy[value], 0, (size_t)(there * bytes[value]));
        for (; at.key == first + there && at.key < last; there++) {
            EACH(value, 2) {
                const char *far = row_at(plan, call, task, kv_head, value, ahead.key < past ? ahead : at);
                for (int64_t i = 0; i < bytes[value]; i += 64)
                    __builtin_prefetch(far + i, 0, 2);
                memcpy(copy[value] + there * bytes[value], row_at(plan, call, task, kv_head, value, at),
                       (size_t)bytes[value]);
            }
            at = next_place(blocks, call->block_size, at, 1);
            ahead = next_place(blocks, call->block_size, ahead, 1);
        }
        if (first + there == k1) {
            EACH(value, 2)
            memset(copy[value] + there * bytes[value], 0, (size_t)((CA_LANES - there) * bytes[value]));
            there = CA_LANES;
        }
        g[n] = (group){.k = copy[0],
                       .v = copy[1],
                       .key = first,
                       .k_ld = s->head_size,
                       .v_ld = s->head_size_v,
                       .n = (int32_t)there,
                       .last = n % SUM_GROUPS == SUM_GROUPS - 1};
    }
    *end = ca_min64(at.key, k1);
    return n;
}

static int copies_groups(const ca_plan *plan, const ca_call *call) {
    return plan->shape.kv_cache_layout != CA_PACKED && call->block_size % CA_LANES;
}

/* How far groups are listed that are fetched while the thread works on keys up to k1; copies would be made for nothing.
 */
static int64_t listed_end(const ca_plan *plan, const ca_call *call, const ca_task *task, int64_t k1) {
    return copies_groups(plan, call) ? k1 : keys_end(plan, task);
}

/* Groups that hold the keys from k0 on, at most `most`, of the blocks that count, in the first or the second place of
 * x. Returns how many; *end is the first key that counts after them, or k1. */
static int list_groups(const ca_plan *plan, const ca_call *call, const ca_task *task, int kv_head, int64_t k0,
                       int64_t k1, int most, const scratch *x, group *g, int64_t *end) {
    if (copies_groups(plan, call))
        return copy_groups(plan, call, task, kv_head, k0, k1, most, x->copies[g == x->groups[1]], g, end);
    const ca_blocks blocks = ca_blocks_of(call, task->request, kv_head);
    const int64_t size = call->block_size;
    const ca_group_form kf = ca_kv_form(plan, 0), vf = ca_kv_form(plan, 1);
    const int64_t k_step = ca_kv_group_step(plan, call, 0), v_step = ca_kv_group_step(plan, call, 1);
    place at = place_of(blocks, size, k0);
    int n = 0;
    for (; n < most && at.key < k1; n++) {
        const int64_t i = (at.key - at.block * size) / CA_LANES;
        const int64_t block = ca_block_of(call, task->request, at.block);
        const char *k = ca_kv_block(plan, call, 0, block, kv_head), *v = ca_kv_block(plan, call, 1, block, kv_head);
        at.key = at.block * size + i * CA_LANES;
        g[n] = (group){.k = k + i * k_step,
                       .v = v + i * v_step,
                       .k_scales = k + ca_scales_at(&kf, size, i),
                       .v_scales = v + ca_scales_at(&vf, size, i),
                       .key = at.key,
                       .k_ld = call->k_ld,
                       .v_ld = call->v_ld,
                       .n = (int32_t)ca_min64(CA_LANES, size - i * CA_LANES),
                       .last = n % SUM_GROUPS == SUM_GROUPS - 1};
        at = next_place(blocks, size, at, g[n].n);
    }
    *end = ca_min64(at.key, k1);
    return n;
}

/* The same groups of the kv head that is so many heads on, and so many rows. */
static void move_groups(const ca_plan *plan, const ca_call *call, int heads, int rows, const group *from, int n,
                        group *to) {
    const ca_shape *s = &plan->shape;
    const int64_t k = (heads * call->k_stride_h + rows * s->head_size) * ca_dtype_size(s->k_dtype);
    const int64_t v = (heads * call->v_stride_h + rows * s->head_size_v) * ca_dtype_size(s->v_dtype);
    for (int i = 0; i < n; i++) {
        to[i] = from[i];
        to[i].k += k;
        to[i].v += v;
        to[i].k_scales += k;
        to[i].v_scales += v;
    }
}

/* What is fetched while the h-th of some kv heads is at work, its groups and those of the first one's next block being
 * in b: what lies next, the keys of the next head, or of the first one in the next block; a share of the rows of all
 * heads there, where these fetch for one another. */
static void list_coming(const ca_plan *plan, const ca_call *call, int h, int num_heads, group *room, block *b) {
    const int here = !b->together && h + 1 < num_heads;
    const int heads = b->together ? h : here, rows = b->together ? h * (CA_LANES - 1) : 0;
    if (here)
        b->num_next = b->num_groups;
    move_groups(plan, call, heads, rows, here ? b->groups : b->next, b->num_next, room);
    b->next = room;
}

/* In a walk over K of n groups, V of them, K and V of the next block, what comes so many steps after the i-th as
 * `ahead` says, and its scales. One step gave 0.88 to 0.91 of the read bandwidth in decode-8x8k, two 0.88 to 0.94 (Zen
 * 4). A block ahead rows, since other heads may come between (run_heads), which made 0.6 of packed 1.0; and what is
 * unpacked first, which has been read when products run. Where two tiles share it, each asks for half of the groups in
 * every step, and in place of the others for what it reads: time of decode with 9 to 16 query rows a kv head, in turns,
 * 0.87 to 0.95, and by one tile for all of it, a block ahead, 0.99 to 1.03; by turns of NG groups 0.98 to 1.04. */
static const ahead *look_ahead(const block *b, const group *g, int n, int i, ahead *next) {
    const int far = i + (b->far || b->ahead * NG > 2 * n ? 2 * n : b->ahead * NG), m = b->num_next;
    const char *read = i < n ? g[i].k : g[i - n].v;
    for (int j = 0; j < NG; j++) {
        if (b->half && (j < NG / 2) != (b->half == 1)) {
            next->at[j] = read;
            continue;
        }
        int at = far + j, count = n;
        if (at >= 2 * n && m) {
            at -= 2 * n;
            count = m;
            g = b->next;
        }
        const int value = at >= count;
        const group *here = g + (value ? ca_min64(at, 2 * count - 1) - count : at);
        next->at[j] = value ? here->v : here->k;
        next->how = value ? b->v_next : b->k_next;
        const char *scales = value ? here->v_scales : here->k_scales;
        for (int64_t s = 0; s < (value ? b->v_scales : b->k_scales); s += 2)
            __builtin_prefetch(scales + s * CA_LANES * 2, 0, 2);
    }
    return next;
}
