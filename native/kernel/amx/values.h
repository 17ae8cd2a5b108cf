/* SPDX-License-Identifier: Apache-2.0
 * This file lays out V of a block for the tiles, for amx/attention.h. */

static int in_segment(const group *g, int t, int64_t k0, int64_t k1) {
    return t < g->n && g->key + t >= k0 && g->key + t < k1;
}

/* Copies V of a group's keys in the segment, from element `at` on. Other keys, whose V may be NaN, become 0. */
static void copy_values(const group *g, int64_t at, int64_t k0, int64_t k1, int64_t head_size_v, uint16_t *to) {
    const uint16_t *from = (const uint16_t *)g->kv[V].at + at;
    const size_t bytes = (size_t)head_size_v * 4;
    for (int t = 0; t < CA_LANES; t += 2, from += 2 * head_size_v, to += 2 * head_size_v) {
        int even = in_segment(g, t, k0, k1), odd = in_segment(g, t + 1, k0, k1);
        if (even || odd)
            memcpy(to, from, bytes);
        else
            memset(to, 0, bytes);
        for (int64_t c = 0; even != odd && c < head_size_v; c++)
            to[2 * c + even] = 0;
    }
}

/* n is a multiple of 2 * VL. */
static int all_finite(const uint16_t *x, int64_t n) {
    uint16_t room[2 * VL];
    int ok = 1;
    vi least = v_set1_int(-1);
    for (int64_t i = 0; i < n; i += 2 * VL)
        least = v_least_room(least, v_load_words(x + i));
    v_store_words(room, least);
    for (int i = 0; i < 2 * VL; i++)
        ok &= room[i] >= 0x80;
    return ok;
}

/* Sets where tiles read V of a score block, two groups at a time. Keys that a row may not see weigh 0 there, which
 * equals skipping them if V is finite. Returns 0 if V of a key that only some of the task's rows see is not finite. */
static int lay_out_values(tile_work *w, const score_block *b, int64_t rows) {
    const int64_t dv = w->head_size_v, group_bytes = CA_LANES * dv * 2;
    const edges e = edges_of(&w->scratch, b, 0, rows);
    for (int i = 0; i < b->num_groups; i += 2) {
        const group *g = b->groups + i, *h = i + 1 < b->num_groups ? g + 1 : NULL;
        int64_t first = ca_max64(g->key, b->k0), end = ca_min64((h ? h : g)->key + (h ? h : g)->n, b->k1);
        uint16_t *copy = w->copies + i / 2 * DEPTH * dv;
        int contiguous = h && g->n == CA_LANES && h->n == CA_LANES && h->kv[V].at == g->kv[V].at + group_bytes;
        if (contiguous && first == g->key && end == h->key + CA_LANES) {
            w->v[i / 2] = (const uint16_t *)g->kv[V].at;
        } else {
            w->v[i / 2] = copy;
            for (int64_t part = 0, at = 0; part < w->kv[V].parts;
                 part++, at += w->kv[V].apart, copy += w->kv[V].apart) {
                copy_values(g, at, b->k0, b->k1, dv, copy);
                if (h)
                    copy_values(h, at, b->k0, b->k1, dv, copy + CA_LANES * dv);
                else
                    memset(copy + CA_LANES * dv, 0, (size_t)group_bytes);
            }
        }
        int ragged = first < e.all_lo || end > e.all_hi;
        if (ragged && !all_finite(w->v[i / 2], DEPTH * dv))
            return 0;
    }
    return 1;
}

/* Are the values of a block all less than 2^-60, and some not 0? Those of models are not, of which this looks at one
 * vector. */
static int values_are_tiny(const tile_work *w, int num_groups) {
    const vf zero = v_set1(0), large = v_set1(0x1p-60f);
    int some = 0;
    for (int i = 0; i < (num_groups + 1) / 2; i++)
        for (int64_t c = 0; c < DEPTH * w->head_size_v; c += 2 * VL) {
            const vf even = v_abs(v_even_bf16(w->v[i] + c)), odd = v_abs(v_odd_bf16(w->v[i] + c));
            if (v_any_less(large, v_max(even, odd)))
                return 0;
            some |= v_any_less(zero, v_max(even, odd));
        }
    return some;
}
