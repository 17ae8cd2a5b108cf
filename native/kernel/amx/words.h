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

/* Says how a score becomes a logit: times `units` or, if capped, by cap(score times factor) times `units`. */
typedef struct logit_scale {
    float factor, units;
    int capped;
} logit_scale;

typedef struct word_rows {
    float reference[STRIP][VL]; /* of words that are 0, in units of 1 / V_OCTAVE, and a dither (v_dither) */
} __attribute__((aligned(64))) word_rows;

INLINE vf logits(logit_scale scale, vf scores) {
    return scale.capped ? v_cap_bf16(v_mul(scores, v_set1(scale.factor))) : scores;
}

/* Says how the scores of a step become weights. What does not change from row to row stays in registers. */
typedef struct weight_maker {
    v_word_order order;
    v_powers_table powers;
    vf units; /* negated */
    logit_scale scale;
    int all;              /* Each row sees all keys of the step, else those that `seen` says. */
    const float *scores;  /* [STRIP][STEP_KEYS] */
    const uint32_t *seen; /* [STRIP] */
    uint16_t *to;         /* [STRIP][STEP_KEYS] */
} weight_maker;

/* Makes the weights of n rows from r on. */
INLINE void put_weights(const word_rows *x, const weight_maker *w, int r, int n) {
    EACH(j, n) {
        const float *s = w->scores + (r + j) * STEP_KEYS;
        const vf reference = v_load_f32(x->reference[r + j]);
        const vf a = v_fma(logits(w->scale, v_load_f32(s)), w->units, reference);
        const vf b = v_fma(logits(w->scale, v_load_f32(s + VL)), w->units, reference);
        const vi words = v_words(&w->order, w->all, a, b, w->all ? 0 : w->seen[r + j]);
        v_store_pairs(w->to + (r + j) * STEP_KEYS, v_powers_of_words(&w->powers, v_rest_of_words(&w->order, words)));
    }
}

/* Takes the references that the state has, row_max, or for rows that have seen nothing some from the scores of a step.
 * octaves_of: these, in units of 1 / V_OCTAVE. Returns 0 where one is so large that a word could not say by how much a
 * logit is less. */
static NOINLINE int find_references(word_rows *x, float *octaves_of, const float *row_max, logit_scale scale,
                                    const float *scores, const uint32_t *seen) {
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
        v_store(octaves_of + r, octaves);
        v_store(at, v_add(octaves, v_set1(WORD_MAX - V_ONE)));
        EACH(i, VL) v_store(x->reference[r + i], v_add(v_set1(at[i]), v_dither()));
    }
    return v_hmax(far) == 0;
}

/* Adds the sums of a unit's weights to row_sum, and has row_max say what they refer to. Returns 0 where words do not
 * do, having changed nothing: one of them may be 0. */
static NOINLINE int take_sums(const float (*sums)[CA_LANES], const float *octaves, float *row_max, float *row_sum) {
    const vf none = v_set1(-INFINITY), zero = v_set1(0), most = v_set1(WEIGHTS_MAX);
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
