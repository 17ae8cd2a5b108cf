/* SPDX-License-Identifier: Apache-2.0
 * Here tiles form the scores by which an indexer selects keys (attention/token_sums.inc), for amx/attention.h. The
 * heads of a query token are rows of strips, which share each block of keys with the task's other query tokens. */

/* Scores of the block's keys for one query token, whose heads are rows from `row` on. first: number of its first strip.
 */
static void score_keys(tile_work *w, const score_block *b, int64_t row, int first, const float *weights,
                       float *scores) {
    const int64_t heads = w->plan->group_size;
    const int lanes = b->num_groups * CA_LANES;
    float sum[KEYS];
    memset(sum, 0, sizeof sum);
    for (int64_t h = 0; h < heads; h += STRIP) {
        const strip t = {.row = row + h,
                         .rows = (int)ca_min64(STRIP, heads - h),
                         .number = first + (int)(h / STRIP),
                         .g = b->groups,
                         .num_groups = b->num_groups,
                         .next = b->next,
                         .num_next = ca_side_ready(w->plan, K) ? b->num_next : 0};
        form_scores(w, &t);
        for (int r = 0; r < t.rows && w->kv[K].scaled; r++)
            scale_scores(&t, w->s + r * S_STRIDE);
        add_relu_bf16(w->s, t.rows, weights + h, lanes, sum);
    }
    put_token_scores_bf16(b, sum, scores);
}

static void score_tokens(const ca_plan *plan, const ca_call *call, const ca_task *task, const float *weights,
                         int64_t k0, int64_t k1, float *scores, int64_t stride, void *memory) {
    const int64_t heads = plan->group_size;
    const int strips = (int)ca_div_up(heads, STRIP);
    tile_work w = begin_work(plan, call, task, 0, 1, task->num_tokens * strips, memory);
    w.pipe = NULL;
    const int most = most_groups(&w);
    score_block b = {.k0 = k0, .groups = w.x.groups[0], .next = w.x.groups[1]};
    load_queries_bf16(plan, &w.x, 0, ca_rows_of(plan, task));
    b.num_groups = list_groups(plan, call, task, 0, k0, k1, most, w.x.copies[0], b.groups, &b.k1);
    for (int64_t end, i = 1; b.k0 < k1; b = next_block(&b, end), i++) {
        b.num_next = list_groups(plan, call, task, 0, b.k1, k1, most, w.x.copies[i % 2], b.next, &end);
        score_block here = b;
        if (!ca_side_ready(plan, K)) {
            here.groups = memcpy(w.x.groups[2], b.groups, (size_t)b.num_groups * sizeof(group));
            bring(&w, &here, K);
        }
        for (int32_t t = 0; t < task->num_tokens; t++)
            score_keys(&w, &here, t * heads, t * strips, weights + t * heads, scores + t * stride);
    }
    tile_release();
}
