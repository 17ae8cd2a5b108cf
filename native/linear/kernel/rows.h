/* SPDX-License-Identifier: Apache-2.0
 * Rows of elements of any dtype become float32 and back. A row in scratch has room for a multiple of 16 numbers, of
 * which those past its end are 0. */

#define LINEAR_PAD(n) ca_round_up(n, CA_LANES)

#define LINEAR_WIDEN(T, ELEMENT)                                                                                       \
    for (; i + VL <= n; i += VL)                                                                                       \
        v_store(dst + i, v_load_##T((const ELEMENT *)src + i));                                                        \
    if (i < n)                                                                                                         \
        v_store(dst + i, v_loadn_##T((const ELEMENT *)src + i, (int)(n - i)));

static void linear_widen(const void *src, int dtype, int64_t n, float *dst) {
    int64_t i = 0;
    for (int64_t j = n / VL * VL; j < LINEAR_PAD(n); j += VL)
        v_store(dst + j, v_set1(0));
    if (dtype == CA_F32) {
        LINEAR_WIDEN(f32, float)
    } else if (dtype == CA_F16) {
        LINEAR_WIDEN(f16, uint16_t)
    } else {
        LINEAR_WIDEN(bf16, uint16_t)
    }
}

#define LINEAR_NARROW(T, ELEMENT)                                                                                      \
    for (; i + VL <= n; i += VL)                                                                                       \
        v_storen_##T((ELEMENT *)dst + i, v_load_f32(src + i), VL);                                                     \
    if (i < n)                                                                                                         \
        v_storen_##T((ELEMENT *)dst + i, v_load_f32(src + i), (int)(n - i));

static void linear_narrow(const float *src, int64_t n, int dtype, void *dst) {
    int64_t i = 0;
    if (dtype == CA_F32) {
        LINEAR_NARROW(f32, float)
    } else if (dtype == CA_F16) {
        LINEAR_NARROW(f16, uint16_t)
    } else {
        LINEAR_NARROW(bf16, uint16_t)
    }
}

static float linear_number(const void *p, int dtype, int64_t i) {
    return dtype == CA_F32   ? ((const float *)p)[i]
           : dtype == CA_F16 ? ca_from_f16(((const uint16_t *)p)[i])
                             : ca_from_bf16(((const uint16_t *)p)[i]);
}

/* Gives rows [rows] of `columns` numbers as columns: element (r, c) goes to dst[c * ld_dst + r]. src has room for whole
 * multiples of 16 rows and columns; dst gets these, too. */
static void linear_transpose(const float *src, int64_t ld, int64_t rows, int64_t columns, float *dst, int64_t ld_dst) {
    for (int64_t r = 0; r < rows; r += CA_LANES)
        for (int64_t c = 0; c < columns; c += LINES) {
            float lines[LINES * CA_LANES];
            v_lines_f32(lines, src + r * ld + c, ld * 4, LINES);
            for (int64_t i = 0; i < LINES; i++)
                memcpy(dst + (c + i) * ld_dst + r, lines + i * CA_LANES, sizeof(float) * CA_LANES);
        }
}
