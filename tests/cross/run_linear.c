/* SPDX-License-Identifier: Apache-2.0
 * This program runs one call of linear attention, whose arrays come from standard input, and writes outputs and states
 * to standard output. tests/native/test_linear_cross.py builds it for another architecture. */
#include "cpu_attn.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void die(const char *why) {
    fprintf(stderr, "run_linear: %s\n", why);
    exit(2);
}

static void *take(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!memory || fread(memory, 1, bytes, stdin) != bytes)
        die("standard input is short");
    return memory;
}

static int64_t bytes_of(const ca_array *a) {
    int64_t size = a->itemsize;
    for (int i = 0; i < a->ndim; i++)
        size *= a->shape[i];
    return size;
}

/* An array comes as dtype, itemsize (0: it is absent), ndim, four sizes, then its elements. */
static ca_array take_array(void) {
    const int64_t *head = take(7 * sizeof *head);
    ca_array a = {.dtype = (int32_t)head[0], .itemsize = (int32_t)head[1], .ndim = (int32_t)head[2], .writable = 1};
    int64_t step = 1;
    for (int i = a.ndim - 1; i >= 0; step *= a.shape[i--]) {
        a.shape[i] = head[3 + i];
        a.strides[i] = step;
    }
    if (a.itemsize)
        a.address = (uintptr_t)take((size_t)bytes_of(&a));
    return a;
}

static int isa_by_name(const char *name) {
    ca_isa_info info;
    for (int i = 0; ca_isa(i, &info); i++)
        if (!strcmp(info.name, name) && info.supported)
            return i;
    die("no such isa");
    return -1;
}

int main(int argc, char **argv) {
    if (argc != 2)
        die("usage: run_linear ISA < arrays");
    ca_linear_shape shape = *(const ca_linear_shape *)take(sizeof shape);
    const ca_linear_how how = *(const ca_linear_how *)take(sizeof how);
    const size_t reqs = (size_t)shape.num_reqs;
    const int32_t *starts = take((reqs + 1) * 4), *first = take(reqs * 4);
    const uint8_t *brings = take(reqs);
    ca_array a[CA_LINEAR_ARRAYS];
    ca_fault fault = {0};
    for (int i = 0; i < CA_LINEAR_ARRAYS; i++)
        a[i] = take_array();
    shape.isa = isa_by_name(argv[1]);
    ca_linear_plan *plan = ca_linear_plan_new(&shape, starts, first, brings);
    const int64_t bytes = ca_linear_workspace_bytes(plan);
    if (ca_linear_attend(plan, 0, a, &how, aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64), bytes, &fault)) {
        fprintf(stderr, "status %d, argument %d, position %d\n", fault.status, fault.argument, (int)fault.position);
        die("refused");
    }
    for (int i = 0; i < 2; i++)
        fwrite((const void *)a[i].address, 1, (size_t)bytes_of(&a[i]), stdout);
    return 0;
}
