/* SPDX-License-Identifier: Apache-2.0
 * This file makes bf16 of K and V of integers with scales, for amx/attention.h.
 *
 * Where a token has one scale, as in int8, tiles multiply the integers, which bf16 holds exactly; K's scales go to the
 * scores and V's to the weights.
 *
 * Where it has several, as in int4, the up to 7 bits of an integer times the 8 of a scale are the sum of two bf16
 * numbers: tiles multiply one, then the other, which takes twice the products. */

/* Stores pairs of numbers of up to 16 bits as two parts: their first 8 bits at `to`, and what is left `apart` elements
 * further. */
INLINE void put_parts(uint16_t *to, int64_t apart, vf even, vf odd) {
    v_put_pairs(to, even, odd);
    v_put_pairs(to + apart, v_sub(even, v_even_bf16(to)), v_sub(odd, v_odd_bf16(to)));
}

static void put_k_parts(const uint16_t *from, const char *scales, int64_t head_size, int64_t shared, int64_t apart,
                        uint16_t *to) {
    for (int64_t d = 0; d < head_size; d += 2, from += 2 * VL, to += 2 * VL) {
        vf scale = v_load_bf16((const void *)(scales + d / shared * CA_LANES * 2));
        put_parts(to, apart, v_mul(v_even_bf16(from), scale), v_mul(v_odd_bf16(from), scale));
    }
}

INLINE vf scale_of_token(const char *scales, int64_t s, int t) {
    uint16_t scale;
    memcpy(&scale, scales + (s * CA_LANES + t) * 2, sizeof scale);
    return v_set1(ca_from_bf16(scale));
}

/* This may write 2 * VL elements past the group. */
static void put_v_parts(const uint16_t *from, const char *scales, int64_t head_size_v, int64_t shared, int64_t apart,
                        uint16_t *to) {
    for (int t = 0; t < CA_LANES; t += 2, from += 2 * head_size_v, to += 2 * head_size_v)
        for (int64_t c = 0; c < head_size_v; c += VL) {
            vf even = v_mul(v_even_bf16(from + 2 * c), scale_of_token(scales, c / shared, t));
            vf odd = v_mul(v_odd_bf16(from + 2 * c), scale_of_token(scales, c / shared, t + 1));
            put_parts(to + 2 * c, apart, even, odd);
        }
}

/* Dequantises K, or V, of a score block to where tiles read it. */
static void dequantise(tile_work *w, const score_block *b, int kv) {
    const ca_shape *s = &w->plan->shape;
    const int kv_dtype = ca_kv_dtype(s, kv);
    const ca_group_form f = ca_kv_form(w->plan, kv);
    const int64_t step = kv == V ? CA_LANES * s->head_size_v : f.elements, apart = w->kv[kv].apart;
    const int64_t shared = ca_scale_elements(kv_dtype, ca_kv_head_size(s, kv));
    uint16_t *to = w->kv[kv].wide;
    for (int i = 0; i < b->num_groups; i++, to += step) {
        group *g = b->groups + i;
        const char *from = g->kv[kv].at, *scales = g->kv[kv].scales;
        unpack_bf16((const uint8_t *)from, f.elements, kv_dtype, has_one_scale(kv_dtype) ? to : w->stage, from);
        if (!has_one_scale(kv_dtype) && kv == V)
            put_v_parts(w->stage, scales, s->head_size_v, shared, apart, to);
        if (!has_one_scale(kv_dtype) && kv == K)
            put_k_parts(w->stage, scales, s->head_size, shared, apart, to);
        g->kv[kv].at = (const char *)to;
    }
}
