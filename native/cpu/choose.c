/* SPDX-License-Identifier: Apache-2.0
 * This file holds the one table of isas. build_ffi.py writes isa_list.h: CA_ISA_LIST has the files of native/isa that
 * this compiler and architecture could build, CA_ISA_ABSENT has the others, each with the reason. A variant, which is a
 * file with a line `of:`, is in CA_ISA_VARIANTS or CA_ISA_ABSENT_VARIANTS instead: its kernels for some
 * dtypes replace those of the isa that it is of, unless the variant misses something here. */
#include "cpu.h"
#include "isa_list.h"
#include "kernel/kernel.h"
#include <string.h>

#define ISA(name, unit) extern const ca_isa_row ca_isa_##name;
#define VARIANT(name, of, dtype) extern const ca_isa_row ca_isa_##name;
CA_ISA_LIST CA_ISA_VARIANTS
#undef ISA
#undef VARIANT

    static const struct {
    const char *name, *unit;
    const ca_isa_row *row;
} rows[] = {
#define ISA(name, unit) {#name, unit, &ca_isa_##name},
    CA_ISA_LIST
#undef ISA
};
static struct {
    const char *name, *of;
    int dtype;
    const ca_isa_row *row;
    const char *reason; /* why its kernel is not taken; NULL: it is */
} variants[] = {
#define VARIANT(name, of, dtype) {#name, #of, dtype, &ca_isa_##name, NULL},
#define ABSENT_VARIANT(name, of, dtype, reason) {#name, #of, dtype, NULL, reason},
    CA_ISA_VARIANTS CA_ISA_ABSENT_VARIANTS
#undef VARIANT
#undef ABSENT_VARIANT
    {NULL, NULL, 0, NULL, NULL}};
static const struct {
    const char *name, *unit, *reason;
} absent[] = {
#define ABSENT(name, unit, reason) {#name, unit, reason},
    CA_ISA_ABSENT
#undef ABSENT
    {NULL, NULL, NULL}};

#define NUM_ROWS ((int)(sizeof rows / sizeof rows[0]))
#define NUM_ABSENT ((int)(sizeof absent / sizeof absent[0]) - 1)

/* These tables are written once, when the library loads. `chosen` says what each isa offers on this machine, variants
 * included. */
static ca_isa_row chosen[NUM_ROWS];
/* Kernels that are completed by those of another isa (`rest`). */
static ca_kernel completed[NUM_ROWS][CA_DTYPES];
/* next[isa][dtype] is the isa's own kernel for the dtype, or, where the isa does not run here or has none of its own,
 * that of the next best isa (ca_kernel_for). exact[isa][dtype] is chosen likewise among the kernels that do not round
 * weights (ca_attention_kernel). */
static const ca_kernel *next[NUM_ROWS][CA_DTYPES], *exact[NUM_ROWS][CA_DTYPES];

static const ca_kernel *complete(ca_kernel *to, const ca_kernel *own, const ca_kernel *rest) {
    *to = *rest;
    to->info.rows = own->info.rows;
    to->info.method = own->info.method;
    to->engine = own->engine;
    return to;
}

__attribute__((constructor)) static void choose(void) {
    for (int i = 0; i < NUM_ROWS; i++) {
        chosen[i] = *rows[i].row;
        for (int d = 0; d < CA_DTYPES; d++)
            if (chosen[i].kernels[d] && !chosen[i].kernels[d]->merge)
                chosen[i].kernels[d] = complete(&completed[i][d], chosen[i].kernels[d], chosen[i].rest->kernels[d]);
    }
    for (int v = 0; variants[v].of; v++) {
        const int d = variants[v].dtype;
        if (variants[v].row)
            variants[v].reason = variants[v].row->missing();
        for (int i = 0; i < NUM_ROWS; i++)
            if (!variants[v].reason && !strcmp(rows[i].name, variants[v].of))
                chosen[i].kernels[d] = variants[v].row->kernels[d];
    }
    for (int i = NUM_ROWS - 1; i >= 0; i--) {
        const ca_kernel *const *own = rows[i].row->kernels;
        const int runs = !rows[i].row->missing(), more = i + 1 < NUM_ROWS;
        for (int d = 0; d < CA_DTYPES; d++) {
            const int whole = runs && own[d] && own[d]->merge;
            next[i][d] = whole ? own[d] : more ? next[i + 1][d] : NULL;
            exact[i][d] = whole && own[d]->weights == CA_F32 ? own[d] : more ? exact[i + 1][d] : NULL;
        }
    }
}

const ca_isa_row *ca_isa_get(int isa) { return isa >= 0 && isa < NUM_ROWS ? &chosen[isa] : NULL; }

const ca_kernel *ca_kernel_for(int isa, int dtype) { return next[isa][dtype]; }

/* Isas that were built come first, so that i is also their index in `rows`. Both parts have the best isa first, as
 * build_ffi.py sorts them. */
int ca_isa(int i, ca_isa_info *out) {
    if (i < 0 || i >= NUM_ROWS + NUM_ABSENT)
        return 0;
    if (i >= NUM_ROWS) {
        *out = (ca_isa_info){absent[i - NUM_ROWS].name, absent[i - NUM_ROWS].unit, 0, 0, absent[i - NUM_ROWS].reason};
        return 1;
    }
    const char *missing = rows[i].row->missing();
    *out = (ca_isa_info){rows[i].name, rows[i].unit, 1, missing == NULL, missing ? missing : ""};
    return 1;
}

static const ca_kernel *kernel(int isa, int dtype) {
    const ca_isa_row *row = ca_isa_get(isa);
    return row && dtype >= 0 && dtype < CA_DTYPES ? row->kernels[dtype] : NULL;
}

const ca_kernel *ca_attention_kernel(const ca_shape *s) {
    const ca_kernel *k = chosen[s->isa].kernels[s->dtype];
    const int few = k->weights != CA_F32 && s->head_size_v < CA_FEW_COLUMNS;
    return few || (k->weights == CA_F16 && ca_is_scaled(s->v_dtype)) ? exact[s->isa][s->dtype] : k;
}

int ca_isa_kernel(int isa, int dtype, ca_kernel_info *out) {
    const ca_kernel *k = kernel(isa, dtype);
    if (!k)
        return 0;
    *out = k->info;
    if (!k->integers || !*k->integers)
        out->integers = NULL;
    for (int v = 0; variants[v].of; v++)
        if (variants[v].reason && variants[v].dtype == dtype && !strcmp(rows[isa].name, variants[v].of)) {
            out->variant = variants[v].name;
            out->reason = variants[v].reason;
        }
    return 1;
}

int64_t ca_block_elements(int isa, int dtype, int kv_dtype, int64_t block_size, int64_t head_size, int value) {
    const ca_kernel *k = kernel(isa, dtype);
    if (!k)
        return -1;
    const ca_side s = ca_side_of(k, dtype, value, kv_dtype, head_size, CA_PACKED);
    return ca_block_size_of(&s, block_size);
}
