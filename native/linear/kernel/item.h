/* SPDX-License-Identifier: Apache-2.0
 * This is an item's memory: the states of its value heads, and what a chunk of tokens needs. */

/* A chunk of fewer tokens goes step by step. */
#define LINEAR_FEW 4

/* Names rows that the next chunk reads, `step` bytes apart. They are prefetched one by one between the tiles of
 * products, since the rows of a head lie so far apart that no hardware finds them. */
typedef struct linear_ahead {
    const char *at;
    int64_t step, bytes, rows;
} linear_ahead;
#define LINEAR_AHEAD 5 /* by tiles this chunk's outputs; values and gates, keys and queries */

/* Operands of products. Element (i, k) of X is x[i * row + k * column]. Column c of Y lies in group c / 16: element (k,
 * c) is y[c / 16 * group + k * ld + c % 16]; rows that follow one another have group 16. With scales, of each row of X
 * and of each column of Y, elements are pairs of words, of k and k + 1 (words.h). */
typedef struct linear_x {
    const float *at;
    int64_t row, column;
    const float *scale;
} linear_x;
typedef struct linear_y {
    const float *at;
    int64_t group, ld;
    const float *scale;
} linear_y;
/* Room for an operand in words, and the norms of its rows or columns. */
typedef struct linear_packed {
    float *words, *scale;
} linear_packed;

/* An operand of tiles (tiles.h): `tile` elements from one tile of rows, or of columns, to the next. */
typedef struct linear_parts {
    uint16_t *at;
    int64_t tile;
} linear_parts;
#define LINEAR_STEPS(depth) ca_div_up(depth, 32) /* of a product by tiles */
#define LINEAR_PART (CA_LANES * 32)              /* elements of a tile in bfloat16 */
#define LINEAR_SUMS (4 * CA_LANES * CA_LANES)    /* of 2 x 2 tiles */

/* Chunks of fewer tokens go by vectors (MEASUREMENTS.md). It is more than a short piece has where channels have decays,
 * so that what a chunk goes by follows from as many of its tokens. */
#define LINEAR_FEW_BY_TILES(it) ((it)->wide ? 24 : 16)

#ifdef TILES
#define LINEAR_BY_TILES(plan) ((plan)->shape.dtype == CA_BF16)
#else
#define LINEAR_BY_TILES(plan) 0
#endif
#ifdef INTEGERS
#define LINEAR_BY_WORDS(plan) ((plan)->shape.dtype == CA_BF16 && *INTEGERS)
#else
#define LINEAR_BY_WORDS(plan) 0
#endif

typedef struct linear_item {
    const ca_linear_call *c;
    int32_t request, first, end; /* value heads [first, end) */
    int64_t last;                /* the token behind the request's last */
    int64_t dk, dv, kp, vp;      /* the sizes, and as multiples of 16 */
    int delta, wide, erases;     /* wide: each key channel has a decay of its own */
    linear_token x;
    linear_head heads[CA_LINEAR_HEADS];
    float *biases, *skips; /* [heads][kp], [heads][vp] */
    /* A state lies as the cache has it, [Dk][vp] or [Dv][kp]. While `turned` is set it lies as [Dk][vp], though the
     * cache has [Dv][kp]. */
    float *states, *spare, *turned_spare; /* [heads][state_floats], [state_floats] twice */
    int64_t state_floats;
    int turned;
    /* These are of a chunk. */
    float *k, *q, *e, *decay, *decay_less_1; /* [64][kp] */
    float *keys;              /* [kp][64]: rows, transposed; where `wide` [4][kp][16]: keys by groups of 16 tokens */
    float *kk, *qk;           /* [64][64]: products of erasers, or keys, and of queries with keys */
    float *a, *p;             /* [64][64]: these with their decays; by tiles less A */
    float *o, *w, *w_decayed; /* [64][vp]; w_decayed: w times the decays that follow */
    float *ek, *qg;           /* [64][kp]: erasers and queries times their decays */
    float *kg;                /* [64][kp]: keys times the decays that follow */
    float *key_room, *query_room; /* [kp]: of one token, or other numbers of each key channel for a while */
    float *factor, *kept;         /* [kp]: of the state (linear_split) */
    /* Whether products may be of words (words.h); operands are; those that heads share are, -1: there are none. */
    int may_words, words, shared;
    int64_t tokens, coarse; /* tokens of the chunk; its first row that words are too coarse for (coarse.h) */
    linear_packed q_words, k_words, e_words, turned_words, state_words, w_words;
    /* What value heads share: queries and keys by which products multiply, keys with which they do, and the transpose
     * of turned_tokens keys. */
    linear_x by_query, by_key, by_channel;
    linear_y with_keys;
    int64_t turned_tokens;
    int64_t weighed; /* tokens, of whose last one decays_since are */
    int turned_by_words;
    linear_ahead *ahead; /* [LINEAR_AHEAD] */
    /* [80], of tokens: decays, these less 1 and betas; decays since each, up to one of them; what products with the
     * state are multiplied by where they become rows of w, and of o; |w|^2; and what rows of keys and of queries are
     * multiplied by. */
    float *decays, *decays_less_1, *betas, *decays_since, *w_factors, *o_factors, *w_squares, *key_factors,
        *query_factors;
    /* Calls by tiles have these operands (tiles.h): queries, keys and erasers, the transpose of keys, keys, states and
     * w as columns, rows of A and of P; and two blocks of sums. tiles: the chunk goes by tiles, or, where channels have
     * decays, may; pieces: it does. */
    int tiles, pieces;
    linear_parts x_query, x_key, x_eraser, x_channel, y_key, y_state, y_w, x_within;
    float *sums;
    int64_t piece; /* the chunk's token that a piece begins with (tile_chunk.h) */
} linear_item;

static float *linear_take(char *base, int64_t *at, int64_t floats) {
    float *here = (float *)(void *)(base + *at);
    *at += ca_round_up(floats * 4, 64);
    return here;
}

static linear_packed linear_take_packed(char *base, int64_t *at, int64_t depth, int64_t columns) {
    linear_packed x;
    x.words = linear_take(base, at, depth / 2 * columns);
    x.scale = linear_take(base, at, columns);
    return x;
}

static linear_parts linear_take_parts(char *base, int64_t *at, int64_t tiles, int64_t depth) {
    const int64_t tile = LINEAR_STEPS(depth) * 2 * LINEAR_PART;
    return (linear_parts){(void *)linear_take(base, at, tiles * tile / 2), tile};
}

/* Lays out an item's memory, and returns its bytes. */
static int64_t linear_lay_out(const ca_linear_plan *plan, char *base, linear_item *it) {
    int64_t at = 0;
    it->dk = plan->shape.head_k_dim;
    it->dv = plan->shape.head_v_dim;
    it->kp = LINEAR_PAD(it->dk);
    it->vp = LINEAR_PAD(it->dv);
    it->state_floats = it->kp * it->vp;
    float **of_channels[] = {&it->x.k,      &it->x.qa,       &it->x.ea,   &it->x.factor, &it->x.kept,
                             &it->key_room, &it->query_room, &it->factor, &it->kept};
    float **of_values[] = {&it->x.v, &it->x.u, &it->x.w, &it->x.o};
    float **of_tokens[] = {&it->decays,    &it->decays_less_1, &it->betas,       &it->decays_since, &it->w_factors,
                           &it->o_factors, &it->w_squares,     &it->key_factors, &it->query_factors};
    for (int i = 0; i < 9; i++)
        *of_channels[i] = linear_take(base, &at, it->kp);
    for (int i = 0; i < 4; i++)
        *of_values[i] = linear_take(base, &at, it->vp);
    for (int i = 0; i < 9; i++)
        *of_tokens[i] = linear_take(base, &at, CA_CHUNK + CA_LANES);
    it->biases = linear_take(base, &at, plan->heads * it->kp);
    it->skips = linear_take(base, &at, plan->heads * it->vp);
    it->states = linear_take(base, &at, plan->heads * it->state_floats);
    it->spare = linear_take(base, &at, it->state_floats);
    it->turned_spare = linear_take(base, &at, it->state_floats);
    const int64_t rows = plan->longest < LINEAR_FEW ? LINEAR_FEW : ca_min64(CA_CHUNK, LINEAR_PAD(plan->longest));
    float **rows_of_channels[] = {&it->k, &it->q, &it->e, &it->decay, &it->decay_less_1, &it->ek, &it->qg, &it->kg};
    float **rows_of_values[] = {&it->o, &it->w, &it->w_decayed};
    float **squares[] = {&it->kk, &it->qk, &it->a, &it->p};
    for (int i = 0; i < 8; i++)
        *rows_of_channels[i] = linear_take(base, &at, rows * it->kp);
    for (int i = 0; i < 3; i++)
        *rows_of_values[i] = linear_take(base, &at, rows * it->vp);
    for (int i = 0; i < 4; i++)
        *squares[i] = linear_take(base, &at, rows * CA_CHUNK);
    it->keys = linear_take(base, &at, CA_CHUNK * it->kp);
    it->tiles = LINEAR_BY_TILES(plan);
    if (it->tiles) {
        const int64_t rows_of_tiles = CA_CHUNK / CA_LANES, channels = it->kp / CA_LANES, values = it->vp / CA_LANES;
        it->x_query = linear_take_parts(base, &at, rows_of_tiles, it->kp);
        it->x_key = linear_take_parts(base, &at, rows_of_tiles, it->kp);
        it->x_eraser = linear_take_parts(base, &at, rows_of_tiles, it->kp);
        it->x_channel = linear_take_parts(base, &at, channels, CA_CHUNK);
        it->y_key = linear_take_parts(base, &at, rows_of_tiles, it->kp);
        it->y_state = linear_take_parts(base, &at, values, it->kp);
        it->y_w = linear_take_parts(base, &at, values, CA_CHUNK);
        it->x_within = linear_take_parts(base, &at, 2, CA_CHUNK);
        it->sums = linear_take(base, &at, 2 * LINEAR_SUMS);
    }
    it->may_words = LINEAR_BY_WORDS(plan);
    if (it->may_words) {
        it->q_words = linear_take_packed(base, &at, it->kp, CA_CHUNK);
        it->k_words = linear_take_packed(base, &at, it->kp, CA_CHUNK);
        it->e_words = linear_take_packed(base, &at, it->kp, CA_CHUNK);
        it->turned_words = linear_take_packed(base, &at, CA_CHUNK, it->kp);
        it->state_words = linear_take_packed(base, &at, it->kp, it->vp);
        it->w_words = linear_take_packed(base, &at, CA_CHUNK, it->vp);
    }
    return at;
}

static int64_t linear_scratch_bytes(const ca_linear_plan *plan) {
    linear_item it;
    return ca_max64(linear_lay_out(plan, NULL, &it), (3 * CA_MOST_WIDTH + 1) * CA_CONV_CHANNELS * 4);
}

static float *linear_state(const linear_item *it, int32_t head) {
    return it->states + (head - it->first) * it->state_floats;
}

static int linear_is_vk(const linear_item *it) { return it->c->how->state_layout == CA_STATE_VK; }

/* Copies rows between a state in the cache and memory of our own, in the cache's order. */
static void linear_load_state(const linear_item *it, int64_t slot, int32_t head, float *to) {
    const ca_array *cache = &it->c->a[CA_LINEAR_STATE_CACHE];
    const char *from = ca_state_at(cache, slot, head);
    const int64_t rows = linear_is_vk(it) ? it->dv : it->dk, n = linear_is_vk(it) ? it->dk : it->dv;
    for (int64_t i = 0; i < rows; i++)
        linear_widen(from + i * cache->strides[2] * cache->itemsize, cache->dtype, n, to + i * LINEAR_PAD(n));
}
static void linear_store_state(const linear_item *it, int64_t slot, int32_t head, const float *from) {
    const ca_array *cache = &it->c->a[CA_LINEAR_STATE_CACHE];
    char *to = ca_state_at(cache, slot, head);
    const int64_t rows = linear_is_vk(it) ? it->dv : it->dk, n = linear_is_vk(it) ? it->dk : it->dv;
    for (int64_t i = 0; i < rows; i++)
        linear_narrow(from + i * LINEAR_PAD(n), n, cache->dtype, to + i * cache->strides[2] * cache->itemsize);
}

/* Transposes a state of our own out of, or into, the cache's order [Dv][kp], and what lies in `spare` with it. */
static void linear_turn_state(linear_item *it, float *state, int turn) {
    if (turn)
        linear_transpose(state, it->kp, it->vp, it->kp, it->spare, it->vp);
    else
        linear_transpose(state, it->vp, it->kp, it->vp, it->spare, it->kp);
    memcpy(state, it->spare, (size_t)it->state_floats * sizeof *state);
}
static void linear_turn(linear_item *it, int turn) {
    if (!linear_is_vk(it) || it->turned == turn)
        return;
    for (int32_t head = it->first; head < it->end; head++)
        linear_turn_state(it, linear_state(it, head), turn);
    it->turned = turn;
}
