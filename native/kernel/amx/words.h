/* SPDX-License-Identifier: Apache-2.0
 * This file makes the softmax of pipeline.h of integers and permutations.
 *
 * While tiles multiply, the multiplier of port 5 is theirs, so that two instructions of the FMA unit take two cycles,
 * not one; integer additions, logic and permutations keep their rate. The vector kernels' softmax (softmax.inc) has 14
 * instructions of that unit for 32 scores, this one has 4 (MEASUREMENTS.md: AMX).
 *
 * A score becomes a word of 16 bits, which says by how much its logit is less than the largest that words can hold: by
 * word / V_OCTAVE, in units of log2. What is further away becomes WORD_MAX and weighs nothing. A larger logit, NaN and
 * infinities become 0. A weight is v_powers_of_words of WORD_MAX - word, by the same table and roundings as in the
 * vector kernels.
 *
 * A reference is a multiple of 1 / V_OCTAVE; a logit that equals it weighs 1. It lies LEAD above a logit among the
 * first that the row sees, so that other logits may be larger than this one by LEAD. A word of 0 weighs nearly 2, so
 * the sum of a row's weights says whether words did (take_sums). Of Gemma 3 270M's units over 1727 tokens 22 % left the
 * pipeline with a lead of 12 octaves, 0.7 % with 20, none with 30. Weights so small ask for values that are not, since
 * tiles take products below 2^-126 for 0 (values_are_tiny). */

enum { WORD_MAX = 65535, LEAD = 30 * V_OCTAVE };
#define WEIGHTS_MAX 1.98f /* A word of 0 weighs more. */
#define STRIP 32          /* query rows under one pair of B tiles: two tiles of A */
#define STEP_KEYS 32      /* keys of a step of the pipeline: two groups */
#define STEPS (BLOCK_KEYS / STEP_KEYS)
#define STEP_WORDS (STRIP * STEP_KEYS)

/* Says what the keys of a step have where integers stand for keys or values: logit_scale.by, and by how much their
 * weights are more, in units of 1 / V_OCTAVE. V's integers are multiplied by the power of two in their scale, which is
 * exact, and weights by the rest of it, from 1 to 2. Sums of weights are of weights times `shares`, one over that rest
 * as the sum of two bf16 numbers, each in all columns of a tile. */
typedef struct key_scales {
    float by[STEP_KEYS], more[STEP_KEYS];
    uint16_t shares[2][CA_LANES][2 * CA_LANES];
} __attribute__((aligned(64))) key_scales;

/* Says how a score becomes a logit in units of 1 / V_OCTAVE, negated: times `by` or, if capped, as `units` times the
 * cap of that. */
typedef struct logit_scale {
    float by, units;
    int capped;
    const key_scales *keys; /* of each step, or NULL */
} logit_scale;

typedef struct word_rows {
    float reference[STRIP][VL]; /* of words that are 0, in units of 1 / V_OCTAVE, and a dither (v_dither) */
} __attribute__((aligned(64))) word_rows;

/* Says how the scores of a step become weights. What does not change from row to row stays in registers. */
typedef struct weight_maker {
    v_word_order order;
    v_powers_table powers;
    vf by, units;
    int capped, all;        /* all: each row sees all keys of the step, else those that `seen` says. */
    const key_scales *keys; /* of the step, or NULL */
    const float *scores;    /* [STRIP][STEP_KEYS] */
    const uint32_t *seen;   /* [STRIP] */
    uint16_t *to;           /* [STRIP][STEP_KEYS] */
} weight_maker;

/* Adds a reference to the logits of the scores at s, those of the step's keys from `key` on. */
INLINE vf refer_logits(const weight_maker *w, const float *s, int key, vf reference) {
    const vf scores = v_load_f32(s + key), by = w->keys ? v_load_f32(w->keys->by + key) : w->by;
    if (w->keys)
        reference = v_sub(reference, v_load_f32(w->keys->more + key));
    return w->capped ? v_fma(v_cap_bf16(v_mul(scores, by)), w->units, reference) : v_fma(scores, by, reference);
}

/* Makes the weights of n rows from r on. */
INLINE void put_weights(const word_rows *x, const weight_maker *w, int r, int n) {
    EACH(j, n) {
        const float *s = w->scores + (r + j) * STEP_KEYS;
        const vf reference = v_load_f32(x->reference[r + j]);
        const vf a = refer_logits(w, s, 0, reference), b = refer_logits(w, s, VL, reference);
        const vi words = v_words(&w->order, w->all, a, b, w->all ? 0 : w->seen[r + j]);
        v_store_pairs(w->to + (r + j) * STEP_KEYS, v_powers_of_words(&w->powers, v_rest_of_words(&w->order, words)));
    }
}

/* Takes the references that the state has, row_max, or for rows that have seen nothing some from the scores of a step.
 * keys: that step's, or NULL. octaves_of: these, in units of 1 / V_OCTAVE. Returns 0 where one is so
 * large that a word could not say by how much a logit is less. */
static NOINLINE int find_references(word_rows *x, float *octaves_of, const float *row_max, const logit_scale *scale,
                                    const key_scales *keys, const float *scores, const uint32_t *seen) {
    const vf none = v_set1(-INFINITY), sign = v_set1(scale->capped ? 1 : -1);
    vf far = v_set1(0), by[2];
    EACH(i, 2) by[i] = v_mul(sign, keys ? v_load_f32(keys->by + i * VL) : v_set1(scale->by));
    for (int r = 0; r < STRIP; r += VL) {
        float at[VL];
        vf rows[VL];
        EACH(i, VL) {
            const float *s = scores + (r + i) * STEP_KEYS;
            const vf a = v_mul(v_load_f32(s), by[0]), b = v_mul(v_load_f32(s + VL), by[1]);
            rows[i] = v_max(v_keep_bits(a, seen[r + i]), v_keep_bits(b, seen[r + i] >> VL));
        }
        const vf top = v_hmax_of_each(rows), known = v_load_f32(row_max + r);
        /* It is one unit less than LEAD, so that with the dither no row's largest logit weighs less than 2^-30. */
        const vf logits = scale->capped ? v_mul(v_cap_bf16(top), v_set1(-scale->units)) : top;
        vf first = v_add(v_round(logits), v_set1(LEAD - 1));
        first = v_less(none, top, first, v_set1(LEAD));
        const vf octaves = v_less(none, known, v_mul(known, v_set1(V_OCTAVE)), first);
        far = v_less(v_abs(octaves), v_set1(0x1p21f), far, v_set1(1));
        v_store(octaves_of + r, octaves);
        v_store(at, v_add(octaves, v_set1(WORD_MAX - V_ONE)));
        EACH(i, VL) v_store(x->reference[r + i], v_add(v_set1(at[i]), v_dither()));
    }
    return v_hmax(far) == 0;
}

/* Adds the sums of a unit's weights to row_sum, and sets row_max to what these weights refer to. Returns 0, and changes
 * nothing, where a word may have fallen to 0: 16 bits cannot hold the weights of this unit. by_key: the sums are of
 * weights times shares, which are a half at least. */
static NOINLINE int take_sums(const float (*sums)[CA_LANES], int by_key, const float *octaves, float *row_max,
                              float *row_sum) {
    const vf none = v_set1(-INFINITY), zero = v_set1(0), most = v_set1(by_key ? WEIGHTS_MAX / 2 : WEIGHTS_MAX);
    vf sum[STRIP / VL], lost = zero;
    EACH(i, STRIP / VL) {
        float at[VL];
        EACH(j, VL) at[j] = sums[i * VL + j][0];
        sum[i] = v_load_f32(at);
        lost = v_max(lost, v_less(sum[i], most, zero, v_set1(1)));
    }
    if (v_hmax(lost) > 0)
        return 0;
    EACH(i, STRIP / VL) {
        /* Rows that have seen no key keep -inf. */
        const vf known = v_load_f32(row_max + i * VL);
        const vf first = v_mul(v_load_f32(octaves + i * VL), v_set1(1.0f / V_OCTAVE));
        v_store(row_max + i * VL, v_less(none, known, known, v_less(zero, sum[i], first, known)));
        v_store(row_sum + i * VL, v_add(v_load_f32(row_sum + i * VL), sum[i]));
    }
    return 1;
}
