/* SPDX-License-Identifier: Apache-2.0
 * This file forms by tiles the scores by which an indexer selects keys (attention/token_sums.inc). The
 * heads of a query token are rows of strips, which share each block of keys with the task's other query tokens. */

/* Makes the scores of the block's keys for one query token, whose heads are the rows from `row` on. first: the number
 * of its first strip. */
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
                         .num_next = w->plan->sides[K].ready ? b->num_next : 0};
        form_scores(w, &t);
        for (int r = 0; r < t.rows && w->plan->sides[K].one_scale; r++)
            scale_scores(&t, w->s + r * S_STRIDE);
        add_relu_bf16(w->s, t.rows, weights + h, lanes, sum);
    }
    put_token_scores_bf16(b, sum, scores);
}

/* Holds an indexer's scores that are being computed by tiles, as token_work does for vectors. */
typedef struct tile_token_work {
    tile_work tiles;
    const float *weights;
    float *scores;
    int64_t stride;
} tile_token_work;

static int begin_key_block(void *tokens, score_block *b) {
    (void)tokens;
    (void)b;
    return 0;
}

static void score_key_block(void *tokens, const score_block *b, int h) {
    tile_token_work *t = tokens;
    const int64_t heads = t->tiles.plan->group_size;
    const int strips = (int)ca_div_up(heads, STRIP);
    score_block here = *b;
    (void)h; /* an index cache has one kv head */
    if (!t->tiles.plan->sides[K].ready)
        unpack_block(&t->tiles, &here, K);
    for (int32_t i = 0; i < t->tiles.task->num_tokens; i++)
        score_keys(&t->tiles, &here, i * heads, i * strips, t->weights + i * heads, t->scores + i * t->stride);
}

static void score_tokens(const ca_plan *plan, const ca_call *call, const ca_task *task, const float *weights,
                         int64_t k0, int64_t k1, float *scores, int64_t stride, void *memory) {
    const int64_t strips = ca_div_up(plan->group_size, STRIP);
    tile_token_work t = {.tiles = begin_work(plan, call, task, 0, 1, task->num_tokens * strips, memory),
                         .weights = weights,
                         .scores = scores,
                         .stride = stride};
    t.tiles.pipe = NULL;
    const block_walk walk = {.plan = plan,
                             .call = call,
                             .task = task,
                             .num_heads = 1,
                             .max_groups = most_groups(&t.tiles),
                             .k0 = k0,
                             .k1 = k1,
                             .listed_end = k1};
    load_queries_bf16(plan, &t.tiles.scratch, 0, ca_rows_of(plan, task));
    walk_blocks(&walk, &t.tiles.scratch, begin_key_block, score_key_block, &t);
    tile_release();
}
