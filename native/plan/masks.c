/* SPDX-License-Identifier: Apache-2.0
 * This file turns masks into what a plan keeps where causal and window do not say it all: the range of keys that every
 * query token sees and, under a tree mask, which query tokens it sees in that range. Masks go by positions. A rank's
 * keys ascend with their positions, so that a range of positions is a range of keys on every rank. */
#include "check/check.h"
#include "plan.h"
#include <stdlib.h>

static int check_tree(const ca_plan *p, const ca_masks *m, ca_fault *fault) {
    if (m->tree_rows != p->num_tokens)
        return ca_fail(fault, CA_TREE_TOKENS, -1, -1, m->tree_rows, p->num_tokens);
    for (int r = 0; r < p->shape.num_reqs; r++) {
        if (!p->causal[r])
            return ca_fail(fault, CA_TREE_NOT_CAUSAL, r, r, -1, -1);
        if (ca_q_len(p, r) > m->tree_bytes * 8)
            return ca_fail(fault, CA_TREE_NARROW, r, r, ca_q_len(p, r), m->tree_bytes * 8);
        if (ca_context(p, r) < 0)
            return ca_fail(fault, CA_TOKENS_WITHOUT_KEYS, r, r, p->all_lens[r], ca_q_len(p, r));
    }
    return CA_OK;
}

static int check_documents(const ca_plan *p, const ca_masks *m, ca_fault *fault) {
    for (int64_t d = 0; d < m->num_documents; d++) {
        int32_t r = m->documents[2 * d];
        if (ca_context(p, r) < 0)
            return ca_fail(fault, CA_TOKENS_WITHOUT_KEYS, r, r, p->all_lens[r], ca_q_len(p, r));
    }
    return CA_OK;
}

/* A token sees a key by causal, window and chunk, or because both lie in the same span (a clamped span reaches no
 * further back than the window, but past the chunk); and both have to lie in the same document. The token's own key is
 * in each of these ranges, so what is left is one range, too, and from token to token neither of its ends falls. */
static void fill_ranges(const ca_plan *p, const ca_masks *m, int32_t *to_lo, int32_t *to_hi) {
    const int32_t *span = m->spans, *spans_end = span + 3 * m->num_spans;
    const int32_t *doc = m->documents, *docs_end = doc + 2 * m->num_documents;
    const int64_t furthest = p->shape.mm_prefix_clamp_sliding_window ? p->shape.window_left : -1;
    for (int32_t r = 0; r < p->shape.num_reqs; r++) {
        int64_t q_len = ca_q_len(p, r), len = p->all_lens[r], lo, hi;
        for (int64_t i = 0, pos = len - q_len; i < q_len; i++, pos++) {
            ca_visible(p, r, i, &lo, &hi);
            while (span < spans_end && (span[0] < r || (span[0] == r && span[2] < pos)))
                span += 3;
            if (span < spans_end && span[0] == r && span[1] <= pos) {
                lo = ca_min64(lo, ca_max64(span[1], furthest < 0 ? 0 : pos - furthest));
                hi = ca_max64(hi, ca_min64(len, (int64_t)span[2] + 1));
            }
            while (doc < docs_end && (doc[0] < r || (doc + 2 < docs_end && doc[2] == r && doc[3] <= pos)))
                doc += 2;
            if (doc < docs_end && doc[0] == r) {
                lo = ca_max64(lo, doc[1]);
                hi = doc + 2 < docs_end && doc[2] == r ? ca_min64(hi, doc[3]) : hi;
            }
            *to_lo++ = (int32_t)ca_local_keys(&p->shape, lo);
            *to_hi++ = (int32_t)ca_local_keys(&p->shape, hi);
        }
    }
}

/* Copies the bits of a row that stand for tokens of its own request, and returns how many are set. */
static int32_t copy_row(const uint8_t *from, int64_t q_len, uint8_t *to) {
    int32_t count = 0;
    memcpy(to, from, (size_t)ca_div_up(q_len, 8));
    if (q_len % 8)
        to[q_len / 8] &= (uint8_t)((1 << q_len % 8) - 1);
    for (int64_t b = 0; b < ca_div_up(q_len, 8); b++)
        count += __builtin_popcount(to[b]);
    return count;
}

/* Moves the bits of the query tokens whose keys are in this rank's caches to the front of the row. */
static void keep_local(const ca_shape *s, int64_t context, int64_t q_len, uint8_t *row) {
    int64_t n = 0, first = ca_local_keys(s, context), end = ca_local_keys(s, context + q_len);
    for (int64_t key = first; key < end; key++, n++) {
        int seen = ca_sees(row, 0, ca_key_position(s, key) - context);
        row[n / 8] = (uint8_t)((row[n / 8] & ~(1 << n % 8)) | seen << n % 8);
    }
}

/* The depth of a query token in the tree is how many query tokens it sees besides itself. Its position is context +
 * depth. */
static void fill_tree(const ca_plan *p, const ca_masks *m, int32_t *lo, int32_t *hi, uint8_t *tree, int64_t bytes) {
    const int64_t left = p->shape.window_left;
    for (int32_t r = 0; r < p->shape.num_reqs; r++) {
        int64_t start = p->query_start_loc[r], q_len = ca_q_len(p, r), context = ca_context(p, r);
        int32_t *depth = hi + start;
        uint8_t *rows = tree + start * bytes;
        for (int64_t i = 0; i < q_len; i++)
            depth[i] = copy_row(m->tree + (start + i) * m->tree_stride, q_len, rows + i * bytes);
        for (int64_t i = 0; i < q_len; i++)
            depth[i] -= ca_sees(rows + i * bytes, 0, i);
        for (int64_t i = 0; i < q_len; i++) {
            uint8_t *row = rows + i * bytes;
            for (int64_t j = 0; left >= 0 && j < q_len; j++)
                if (depth[i] - depth[j] > left)
                    row[j / 8] &= (uint8_t)~(1 << j % 8);
            lo[start + i] = left < 0 ? 0 : (int32_t)ca_min64(context, ca_max64(0, context + depth[i] - left));
            lo[start + i] = (int32_t)ca_local_keys(&p->shape, lo[start + i]);
            if (p->shape.cp_world_size > 1)
                keep_local(&p->shape, context, q_len, row);
        }
        for (int64_t i = 0; i < q_len; i++)
            hi[start + i] = p->seq_lens[r];
    }
}

int ca_take_masks(ca_plan *p, const ca_masks *m, ca_fault *fault) {
    int64_t bytes = 0, tokens = p->num_tokens;
    int is_tree = m->tree_rows >= 0, status = is_tree ? check_tree(p, m, fault) : check_documents(p, m, fault);
    if (status)
        return status;
    for (int32_t r = 0; is_tree && r < p->shape.num_reqs; r++)
        bytes = ca_max64(bytes, ca_div_up(ca_q_len(p, r), 8));
    int32_t *lo = calloc((size_t)ca_max64(1, tokens), (size_t)(2 * sizeof(int32_t) + (size_t)bytes));
    if (!lo)
        return ca_fail(fault, CA_NO_MEMORY, -1, -1, -1, -1);
    int32_t *hi = lo + tokens;
    uint8_t *tree = is_tree ? (uint8_t *)(hi + tokens) : NULL;
    if (tree)
        fill_tree(p, m, lo, hi, tree, bytes);
    else
        fill_ranges(p, m, lo, hi);
    p->lo = lo;
    p->hi = hi;
    p->tree = tree;
    p->tree_bytes = bytes;
    return CA_OK;
}
