/* SPDX-License-Identifier: Apache-2.0
 * This file finds out whether arrays share memory. */
#include "check.h"
#include "common.h"

int ca_find_extent(const ca_array *a, ca_extent *out) {
    int64_t low = 0, high = 1, step;
    int none = 0, wide = 0;
    for (int i = 0; i < a->ndim && i < 4; i++) {
        none |= !a->shape[i];
        wide |= __builtin_mul_overflow(a->shape[i] - 1, a->strides[i], &step);
        wide |= step < 0 ? __builtin_add_overflow(low, step, &low) : __builtin_add_overflow(high, step, &high);
    }
    *out = (ca_extent){0, 0};
    if (none)
        return 1;
    wide |= __builtin_mul_overflow(low, a->itemsize, &low);
    wide |= __builtin_mul_overflow(high, a->itemsize, &high);
    wide |= __builtin_add_overflow(low, (int64_t)a->address, &out->first);
    wide |= __builtin_add_overflow(high, (int64_t)a->address, &out->end);
    return !wide && out->first > 0;
}

/* A term is x * stride for any x in 0..most. */
typedef struct term {
    int64_t stride, most;
} term;

#define MOST_WORK 65536
#define TERMS 9 /* four axes of each of two arrays, and the bytes of a run */

/* Adds a term to terms that descend by stride; where that stride is there already, its term grows. */
static int add_term(term *terms, int n, int64_t stride, int64_t most) {
    int at = 0;
    while (at < n && terms[at].stride > stride)
        at++;
    if (at < n && terms[at].stride == stride) {
        terms[at].most += most;
        return n;
    }
    memmove(&terms[at + 1], &terms[at], (size_t)(n - at) * sizeof *terms);
    terms[at] = (term){stride, most};
    return n + 1;
}

static int64_t stride_of(const ca_array *a, int axis) {
    return (a->strides[axis] < 0 ? -a->strides[axis] : a->strides[axis]) * a->itemsize;
}

/* No two elements coincide if each axis, from that of the smallest stride on, steps over all that the axes before it
 * reach. Two axes of the same stride do not. An array of more axes than ca_array holds is refused. */
int ca_check_written(const ca_array *a, ca_fault *fault) {
    term terms[4];
    int64_t extent = a->itemsize;
    int n = 0, axes = 0, apart = a->ndim <= 4;
    if (!a->writable)
        return ca_refuse(fault, CA_READ_ONLY, -1, -1, -1);
    if (ca_is_empty(a))
        return CA_OK;
    for (int i = 0; i < a->ndim && apart; i++)
        if (a->shape[i] > 1) {
            n = add_term(terms, n, stride_of(a, i), a->shape[i] - 1);
            apart = n == ++axes;
        }
    while (apart && n--) {
        apart = terms[n].stride >= extent;
        extent += terms[n].stride * terms[n].most;
    }
    return apart ? CA_OK : ca_refuse(fault, CA_OVERLAPS_ITSELF, -1, -1, -1);
}

/* Adds the terms of an array: their sums are its bytes, counted from the lowest. Axes that leave no gap are one run of
 * bytes. */
static int add_array(term *terms, int n, const ca_array *a) {
    int64_t run = a->itemsize;
    int apart = 0; /* a bit for each axis that leaves gaps */
    for (int i = 0; i < a->ndim; i++)
        apart |= (a->shape[i] > 1) << i;
    for (int i = a->ndim - 1; i >= 0; i--)
        if (apart >> i & 1 && stride_of(a, i) <= run) {
            run += (a->shape[i] - 1) * stride_of(a, i);
            apart &= ~(1 << i);
            i = a->ndim; /* an axis that left a gap may leave none now */
        }
    for (int i = 0; i < a->ndim; i++)
        if (apart >> i & 1)
            n = add_term(terms, n, stride_of(a, i), a->shape[i] - 1);
    return add_term(terms, n, 1, run - 1);
}

/* Returns whether `sum` is a sum of terms, the last of which has stride 1. reach[i] is the most that the terms behind
 * number i sum up to, so that of a term only that much is tried which leaves what these can make up for. */
static int is_sum(const term *terms, const int64_t *reach, int64_t sum, int *work) {
    if (terms->stride == 1)
        return sum <= terms->most;
    const int64_t last = ca_min64(terms->most, sum / terms->stride);
    for (int64_t x = ca_max64(0, ca_div_up(sum - *reach, terms->stride)); x <= last; x++)
        if (--*work < 0 || is_sum(terms + 1, reach + 1, sum - x * terms->stride, work))
            return 1;
    return 0;
}

/* a has a byte at its lowest one plus each sum of its terms, b one at its highest minus each sum of its terms. Two of
 * them are the same where both sums together are the distance from a's lowest to b's highest. The answer is 1, too,
 * where the search takes too long. */
int ca_meet(const ca_array *a, ca_extent of_a, const ca_array *b, ca_extent of_b) {
    if (of_a.first >= of_b.end || of_b.first >= of_a.end)
        return 0;
    term terms[TERMS];
    const int n = add_array(terms, add_array(terms, 0, a), b);
    int64_t reach[TERMS] = {0}, most;
    for (int i = n - 1; i > 0; i--)
        if (__builtin_mul_overflow(terms[i].stride, terms[i].most, &most) ||
            __builtin_add_overflow(reach[i], most, &reach[i - 1]))
            return 1;
    int work = MOST_WORK;
    return is_sum(terms, reach, of_b.end - 1 - of_a.first, &work);
}

/* An array of more axes than ca_array holds counts as sharing memory. */
int ca_share_memory(const ca_array *a, const ca_array *b) {
    ca_extent of_a, of_b;
    return a->ndim > 4 || b->ndim > 4 || !ca_find_extent(a, &of_a) || !ca_find_extent(b, &of_b) ||
           ca_meet(a, of_a, b, of_b);
}
