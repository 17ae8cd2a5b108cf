/* SPDX-License-Identifier: Apache-2.0
 * The one table of isas. build_ffi.py writes isa_list.h: in CA_ISA_LIST the files of native/isa that this
 * compiler and architecture could build, in CA_ISA_ABSENT the others with the reason. A file that is `of:` another
 * isa stands in CA_ISA_VARIANTS: where it misses nothing its kernels replace that isa's. */
#include "cpu.h"
#include "isa_list.h"
#include "kernel.h"
#include <string.h>

#define ISA(name, unit) extern const ca_isa_row ca_isa_##name;
#define VARIANT(name, of) extern const ca_isa_row ca_isa_##name;
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
static const struct {
    const char *of;
    const ca_isa_row *row;
} variants[] = {
#define VARIANT(name, of) {#of, &ca_isa_##name},
    CA_ISA_VARIANTS
#undef VARIANT
    {NULL, NULL}};
static const struct {
    const char *name, *unit, *reason;
} absent[] = {
#define ABSENT(name, unit, reason) {#name, unit, reason},
    CA_ISA_ABSENT
#undef ABSENT
    {NULL, NULL, NULL}};

#define NUM_ROWS ((int)(sizeof rows / sizeof rows[0]))
#define NUM_ABSENT ((int)(sizeof absent / sizeof absent[0]) - 1)

/* What each isa offers on this machine, and of it or of the next best one: who writes 16-bit words, whose weights of
 * bfloat16 stay floats. Written once, when the library loads. */
static ca_isa_row chosen[NUM_ROWS];
static const ca_kernel *words[NUM_ROWS], *exact[NUM_ROWS];

__attribute__((constructor)) static void choose(void) {
    for (int i = 0; i < NUM_ROWS; i++)
        chosen[i] = *rows[i].row;
    for (int v = 0; variants[v].row; v++)
        for (int i = 0; i < NUM_ROWS; i++)
            if (!strcmp(rows[i].name, variants[v].of) && !variants[v].row->missing())
                for (int d = 0; d < CA_DTYPES; d++)
                    if (variants[v].row->kernels[d])
                        chosen[i].kernels[d] = variants[v].row->kernels[d];
    for (int i = NUM_ROWS - 1; i >= 0; i--) {
        const ca_kernel *const *own = rows[i].row->kernels;
        const int runs = !rows[i].row->missing(), more = i + 1 < NUM_ROWS;
        words[i] = runs && own[CA_F16] ? own[CA_F16] : more ? words[i + 1] : NULL;
        exact[i] = runs && own[CA_BF16] && !own[CA_BF16]->rounds_weights ? own[CA_BF16] : more ? exact[i + 1] : NULL;
    }
}

const ca_isa_row *ca_isa_get(int isa) { return isa >= 0 && isa < NUM_ROWS ? &chosen[isa] : NULL; }

const ca_kernel *ca_words_kernel(int isa) { return words[isa]; }

/* Built isas first, so that the index is also the table's; best first is build_ffi.py's order. */
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
    return k->rounds_weights && s->head_size_v < CA_FEW_COLUMNS ? exact[s->isa] : k;
}

int ca_isa_kernel(int isa, int dtype, ca_kernel_info *out) {
    const ca_kernel *k = kernel(isa, dtype);
    if (!k)
        return 0;
    *out = k->info;
    out->integers = k->integers && *k->integers;
    return 1;
}

int64_t ca_block_elements(int isa, int dtype, int kv_dtype, int64_t block_size, int64_t head_size, int value) {
    const ca_kernel *k = kernel(isa, dtype);
    if (!k)
        return -1;
    const int64_t pair = ca_layout_of_kind(k->info.layout, kv_dtype) == CA_LAYOUT_PAIRS ? 2 : 1;
    if (ca_is_scaled(kv_dtype)) {
        ca_group_form f = ca_group_form_of(k->info.layout, kv_dtype, head_size, value);
        return ca_scales_at(&f, block_size, ca_div_up(block_size, CA_LANES));
    }
    if (value)
        return ca_round_up(block_size, pair) * head_size;
    return ca_round_up(block_size, CA_LANES) * ca_round_up(head_size, pair);
}
