/* SPDX-License-Identifier: Apache-2.0
 * This file makes the softmax of pipeline.h of integers and permutations.
 *
 * While tiles multiply, the multiplier of port 5 is theirs, so that two instructions of the FMA unit take two cycles,
 * not one; integer additions, logic and permutations keep their rate. The vector kernels' softmax (softmax.inc) has 14
 * instructions of that unit for 32 scores, this one has 4 (MEASUREMENTS.md: AMX).
 *
 * A score becomes a word of 16 bits, which says by how much its logit is less than the largest that words can hold: by
 * word / V_OCTAVE, in units of log2. What is further away becomes WORD_MAX and weighs nothing. A larger logit, NaN and
 * infinities become 0, so the least word of a row says whether words will do. A weight is v_powers_of_words of WORD_MAX
 * - word, by the same table and roundings as in the vector kernels. Words follow a row's reference by subtraction, so
 * those that are there already can be referred to a larger logit.
 *
 * A reference is a multiple of 1 / V_OCTAVE; a logit that equals it weighs 1. At first it lies LEAD above a logit among
 * the first that the row sees, so that other logits may be larger than this one by more than LEAD. When all of a unit's
 * words are there, `grow` moves it, so that the largest logit of a row weighs 2^-30 (LEAD). Of Gemma 3 270M's units
 * over 1727 tokens 22 % left the pipeline with a lead of 12 octaves, 0.7 % with 20, none with 30. Weights so small ask
 * for values that are not, since tiles take products below 2^-126 for 0 (values_are_tiny). */

enum {
    WORD_MAX = 65535,
    LEAD = 30 * V_OCTAVE,
    SLACK = V_OCTAVE / 2 /* Weights may exceed 2^-30 by a factor of 2^(1/2) before O and l follow a larger reference. */
};
#define STRIP 32     /* query rows under one pair of B tiles: two tiles of A */
#define STEP_KEYS 32 /* keys of a step of the pipeline: two groups */
#define STEPS (BLOCK_KEYS / STEP_KEYS)
#define STEP_WORDS (STRIP * STEP_KEYS)

/* Says how a score becomes a logit: times `units` or, if capped, by cap(score times factor) times `units`. */
typedef struct logit_scale {
    float factor, units;
    int capped;
} logit_scale;

typedef struct word_rows {
    float reference[STRIP][VL];       /* of words that are 0, in units of 1 / V_OCTAVE, and a dither (v_dither) */
    uint16_t least[STRIP][STEP_KEYS]; /* the least words of a row, by columns */
    float octaves[STRIP];             /* the references, in units of 1 / V_OCTAVE */
    /* Words are subtracted from this, which stands twice, once their row's reference has grown. The first 8 rows follow
     * once more. */
    int16_t ceiling[STRIP + 8][2];
} __attribute__((aligned(64))) word_rows;

INLINE vf logits(logit_scale scale, vf scores) {
    return scale.capped ? v_cap_bf16(v_mul(scores, v_set1(scale.factor))) : scores;
}

/* Says how the scores of a step become words. What does not change from row to row stays in registers. */
typedef struct word_maker {
    v_word_order order;
    vf units; /* negated */
    logit_scale scale;
    int all;              /* Each row sees all keys of the step, else those that `seen` says. */
    const float *scores;  /* [STRIP][STEP_KEYS] */
    const uint32_t *seen; /* [STRIP] */
    uint16_t *to;         /* [STRIP][STEP_KEYS] */
} word_maker;

/* Makes the words of n rows from r on. */
INLINE void put_words(word_rows *x, const word_maker *w, int r, int n) {
    EACH(j, n) {
        const float *s = w->scores + (r + j) * STEP_KEYS;
        const vf reference = v_load_f32(x->reference[r + j]);
        const vf a = v_fma(logits(w->scale, v_load_f32(s)), w->units, reference);
        const vf b = v_fma(logits(w->scale, v_load_f32(s + VL)), w->units, reference);
        const vi words = v_words(&w->order, w->all, a, b, w->all ? 0 : w->seen[r + j]);
        v_store_words(x->least[r + j], v_min_words(v_load_words(x->least[r + j]), words));
        v_store_words(w->to + (r + j) * STEP_KEYS, words);
    }
}

/* Turns n vectors of words to weights, in place; the first one is row r's, and the next rows' follow. */
INLINE void weigh_words(const word_rows *x, const v_powers_table *powers, int r, int n, uint16_t *words) {
    EACH(j, n) {
        const vi w = v_sub_words(v_set1_words(x->ceiling[r + j]), v_load_words(words + j * STEP_KEYS));
        v_store_pairs(words + j * STEP_KEYS, v_powers_of_words(powers, w));
    }
}

/* Takes the references that the state has, row_max, or for rows that have seen nothing some from the scores of a step.
 * Returns 0 where one is so large that a word could not say by how much a logit is less. */
static NOINLINE int find_references(word_rows *x, const float *row_max, logit_scale scale, const float *scores,
                                    const uint32_t *seen) {
    const vf none = v_set1(-INFINITY);
    vf far = v_set1(0);
    for (int r = 0; r < STRIP; r += VL) {
        float at[VL];
        vf rows[VL];
        EACH(i, VL) {
            const float *s = scores + (r + i) * STEP_KEYS;
            rows[i] =
                v_max(v_keep_bits(v_load_f32(s), seen[r + i]), v_keep_bits(v_load_f32(s + VL), seen[r + i] >> VL));
        }
        const vf top = v_hmax_of_each(rows), known = v_load_f32(row_max + r);
        /* It is one unit less than LEAD, so that with the dither no row's largest logit weighs less than 2^-30. */
        vf first = v_add(v_round(v_mul(logits(scale, top), v_set1(scale.units))), v_set1(LEAD - 1));
        first = v_less(none, top, first, v_set1(LEAD));
        const vf octaves = v_less(none, known, v_mul(known, v_set1(V_OCTAVE)), first);
        far = v_less(v_abs(octaves), v_set1(0x1p21f), far, v_set1(1));
        v_store(x->octaves + r, octaves);
        v_store(at, v_add(octaves, v_set1(WORD_MAX - V_ONE)));
        EACH(i, VL) v_store(x->reference[r + i], v_add(v_set1(at[i]), v_dither()));
    }
    return v_hmax(far) == 0;
}

/* Brings the references of row_max to the words of a whole block, and O and row_sum after them. fresh: O and row_sum
 * are still to be written. Returns 0 where words do not do, having changed nothing: one is 0, or a row's first keys do
 * not say how large its logits are. */
static NOINLINE int grow(word_rows *x, float *row_max, float *row_sum, float *o, int64_t head_size_v, int fresh) {
    const vf none = v_set1(-INFINITY), zero = v_set1(0), one = v_set1(1);
    float to[STRIP], growth[STRIP];
    vf lost = zero;
    for (int r = 0; r < STRIP; r += VL) {
        vi rows[VL];
        EACH(i, VL) rows[i] = v_load_words(x->least[r + i]);
        const vf known = v_load_f32(row_max + r), least = v_hmin_words_of_each(rows);
        const vf over = v_sub(v_set1(WORD_MAX - V_ONE + LEAD), least); /* by which the largest logit weighs too much */
        const vf some = v_less(least, v_set1(WORD_MAX), one, zero), first = v_less(none, known, zero, some);
        lost = v_max(lost, v_max(v_less(zero, least, zero, one), v_less(over, zero, first, zero)));
        const vf more = v_less(v_set1(SLACK), over, over, v_less(zero, first, over, zero));
        v_store(growth + r, more);
        /* Rows that have seen no key keep -inf. */
        v_store(to + r, v_less(zero, v_max(some, v_less(none, known, one, zero)),
                               v_mul(v_add(v_load_f32(x->octaves + r), more), v_set1(1.0f / V_OCTAVE)), known));
    }
    if (v_hmax(lost) > 0)
        return 0;
    for (int r = 0; r < STRIP; r++) {
        x->ceiling[r][0] = x->ceiling[r][1] = (int16_t)(uint16_t)(WORD_MAX - growth[r]);
        if (!fresh && to[r] != row_max[r] && row_max[r] != -INFINITY) {
            const float alpha = exp2_one(row_max[r] - to[r]);
            scale_row(o + r * head_size_v, head_size_v, alpha);
            row_sum[r] *= alpha;
        }
        row_max[r] = to[r];
    }
    memcpy(x->ceiling[STRIP], x->ceiling[0], sizeof x->ceiling - sizeof x->ceiling[0] * STRIP);
    return 1;
}
