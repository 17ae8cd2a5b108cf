/* SPDX-License-Identifier: Apache-2.0
 * This file makes bf16 of K and V of integers with scales, for amx/attention.h.
 *
 * Where a token has one scale, as in int8, tiles multiply the integers, which bf16 holds exactly; K's scales go to the
 * scores and V's to the weights; in the pipeline V is multiplied by the power of two in its scale, and weights by what
 * is left, which stands where the scale was (key_scales).
 *
 * Where it has several, as in int4, the up to 7 bits of an integer times the 8 of a scale are the sum of two bf16
 * numbers: tiles multiply one, then the other, which takes twice the products. V of the pipeline is rounded instead,
 * and what that loses of a token is added to the next token of its group: integers that many tokens have would else err
 * alike in all of them, where outputs are small sums of large terms. */

/* Stores the pairs of a and b as parts in bf16, one every so many elements: a part is the upper half of what those
 * before leave of a number. */
INLINE void split_pairs(int parts, vf a, vf b, uint16_t *to, int64_t step) {
    EACH(i, parts) {
        v_put_pairs(to + i * step, a, b);
        if (i + 1 < parts) {
            a = v_rest(a);
            b = v_rest(b);
        }
    }
}

static void put_k_parts(const uint16_t *from, const char *scales, int64_t head_size, int64_t shared, int64_t apart,
                        uint16_t *to) {
    for (int64_t d = 0; d < head_size; d += 2, from += 2 * VL, to += 2 * VL) {
        vf scale = v_load_bf16((const void *)(scales + d / shared * CA_LANES * 2));
        split_pairs(2, v_mul(v_even_bf16(from), scale), v_mul(v_odd_bf16(from), scale), to, apart);
    }
}

static uint16_t scale_bits(const char *scales, int64_t at) {
    uint16_t scale;
    memcpy(&scale, scales + at * 2, sizeof scale);
    return scale;
}

/* Multiplies V of a group of integers by the powers of two in its scales, and stores what is left of these, from 1
 * to 2. Zeros, infinities and NaN have no power in them, and leave 1. This may write 2 * VL elements past the group. */
static void put_v_powers(const uint16_t *from, const char *scales, int64_t head_size_v, uint16_t *to, uint16_t *rests) {
    float power[CA_LANES];
    for (int t = 0; t < CA_LANES; t++) {
        const uint16_t scale = scale_bits(scales, t), exponent = scale & 0x7f80;
        const int has_power = exponent != 0 && exponent != 0x7f80;
        power[t] = ca_from_bf16(has_power ? scale & 0xff80 : scale);
        rests[t] = has_power ? 0x3f80 | (scale & 0x7f) : 0x3f80;
    }
    for (int t = 0; t < CA_LANES; t += 2, from += 2 * head_size_v, to += 2 * head_size_v)
        for (int64_t c = 0; c < 2 * head_size_v; c += 2 * VL)
            v_put_pairs(to + c, v_mul(v_even_bf16(from + c), v_set1(power[t])),
                        v_mul(v_odd_bf16(from + c), v_set1(power[t + 1])));
}

/* Finds what weights and their sums are multiplied by, for each mantissa of a rest. */
static void find_rest_factors(scale_work *to) {
    for (int i = 0; i < 128; i++) {
        const float rest = 1 + (float)i / 128, share = 1 / rest;
        to->more[i] = V_OCTAVE * log2f(rest);
        to->shares[0][i] = ca_to_bf16(share);
        to->shares[1][i] = ca_to_bf16(share - ca_from_bf16(to->shares[0][i]));
    }
}

INLINE vf scale_of_token(const char *scales, int64_t s, int t) {
    return v_set1(ca_from_bf16(scale_bits(scales, s * CA_LANES + t)));
}

/* This may write 2 * VL elements past the group. */
static void put_v_parts(const uint16_t *from, const char *scales, int64_t head_size_v, int64_t shared, int64_t apart,
                        uint16_t *to) {
    for (int t = 0; t < CA_LANES; t += 2, from += 2 * head_size_v, to += 2 * head_size_v)
        for (int64_t c = 0; c < head_size_v; c += VL) {
            vf even = v_mul(v_even_bf16(from + 2 * c), scale_of_token(scales, c / shared, t));
            vf odd = v_mul(v_odd_bf16(from + 2 * c), scale_of_token(scales, c / shared, t + 1));
            split_pairs(2, even, odd, to + 2 * c, apart);
        }
}

/* Rounds x and what was lost before. What is no finite number, as in slots that hold no token, is lost by itself. */
INLINE vf round_on(vf x, vf *lost) {
    const vf sum = v_add(x, *lost), rounded = v_nearest_bf16(sum), rest = v_sub(sum, rounded);
    *lost = v_less(v_abs(rest), v_set1(INFINITY), rest, v_set1(0));
    return rounded;
}

/* Makes V of a group of integers, the last columns first, since they may be stored over those behind. This may write
 * 2 * VL elements past the group. */
static void put_v_rounded(const uint16_t *from, const char *scales, int64_t head_size_v, int64_t shared, uint16_t *to) {
    for (int64_t c = (head_size_v - 1) / VL * VL; c >= 0; c -= VL) {
        vf lost = v_set1(0);
        EACH(t, CA_LANES / 2) {
            const int64_t at = 2 * (t * head_size_v + c);
            const vf even = v_mul(v_even_bf16(from + at), scale_of_token(scales, c / shared, 2 * t));
            const vf odd = v_mul(v_odd_bf16(from + at), scale_of_token(scales, c / shared, 2 * t + 1));
            const vf first = round_on(even, &lost);
            v_put_pairs(to + at, first, round_on(odd, &lost));
        }
    }
}

/* Dequantises K, or V, of a score block to where tiles read it. */
static void dequantise(tile_work *w, const score_block *b, int kv) {
    const ca_side *s = &w->plan->sides[kv];
    const int64_t step = kv == V ? CA_LANES * s->head_size : s->elements, apart = w->kv[kv].apart;
    /* One scale of a token can go to scores and weights, several have to go to the numbers. */
    const int one_scale = s->one_scale, piped = w->pipe && kv == V;
    uint16_t *to = w->kv[kv].wide;
    for (int i = 0; i < b->num_groups; i++, to += step) {
        group *g = b->groups + i;
        const char *from = g->kv[kv].at, *scales = g->kv[kv].scales;
        unpack_bf16((const uint8_t *)from, s->elements, s->dtype, one_scale && !piped ? to : w->stage, from);
        if (one_scale && piped) {
            uint16_t *rests = w->scales->rests + i * CA_LANES;
            put_v_powers(w->stage, scales, s->head_size, to, rests);
            g->kv[V].scales = (const char *)rests;
        } else if (piped) {
            put_v_rounded(w->stage, scales, s->head_size, s->shared, to);
        } else if (!one_scale && kv == V) {
            put_v_parts(w->stage, scales, s->head_size, s->shared, apart, to);
        } else if (!one_scale) {
            put_k_parts(w->stage, scales, s->head_size, s->shared, apart, to);
        }
        g->kv[kv].at = (const char *)to;
    }
}
