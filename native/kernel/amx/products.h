/* SPDX-License-Identifier: Apache-2.0
 * These functions form the product of two tiles of A by two of B, for amx/attention.h: tiles 0 to 3 hold the sums (two
 * rows of two), 4 and 5 hold A, 6 and 7 hold B. tall says that A has a second tile, wide that B has one. */

typedef struct tile_sizes {
    int rows, depth, columns;
} tile_sizes;

static void size_tile(tile_config *c, int t, int rows, int bytes) {
    c->rows[t] = (uint8_t)(bytes ? rows : 0);
    c->row_bytes[t] = (uint16_t)(rows ? bytes : 0);
}

static NOINLINE void configure(tile_sizes s) {
    tile_config c = {.palette = 1};
    for (int r = 0; r < 2; r++) {
        int n = (int)ca_max64(0, ca_min64(16, s.rows - 16 * r));
        size_tile(&c, 2 * r, n, 4 * s.columns);
        size_tile(&c, 2 * r + 1, n, 4 * s.columns);
        size_tile(&c, 4 + r, n, 2 * s.depth);
        size_tile(&c, 6 + r, s.depth / 2, 4 * s.columns);
    }
    tile_configure(&c);
}

/* Configures the tiles for A [rows][depth] times B [depth][columns], where the second tile of B is as wide as the
 * first. *loaded is 0 before the first time. */
INLINE void shape_tiles(tile_sizes *loaded, int rows, int depth, int columns) {
    if (rows == loaded->rows && depth == loaded->depth && columns == loaded->columns)
        return;
    *loaded = (tile_sizes){rows, depth, columns};
    configure(*loaded);
}

INLINE void zero_sums(int tall, int wide) {
    tile_zero(0);
    if (wide)
        tile_zero(1);
    if (tall)
        tile_zero(2);
    if (tall && wide)
        tile_zero(3);
}

INLINE void load_sums(int tall, int wide, const float *c, int64_t ld) {
    tile_load(0, c, 4 * ld);
    if (wide)
        tile_load(1, c + 16, 4 * ld);
    if (tall)
        tile_load(2, c + 16 * ld, 4 * ld);
    if (tall && wide)
        tile_load(3, c + 16 * ld + 16, 4 * ld);
}

INLINE void store_sums(int tall, int wide, float *c, int64_t ld) {
    tile_store(0, c, 4 * ld);
    if (wide)
        tile_store(1, c + 16, 4 * ld);
    if (tall)
        tile_store(2, c + 16 * ld, 4 * ld);
    if (tall && wide)
        tile_store(3, c + 16 * ld + 16, 4 * ld);
}

#define LOAD_B(t, b)                                                                                                   \
    if (bytes)                                                                                                         \
        tile_load(t, b, ldb);                                                                                          \
    else                                                                                                               \
        tile_stream(t, b, ldb)
#define DOT(t, a, b)                                                                                                   \
    if (bytes)                                                                                                         \
        tile_dot_bytes(t, a, b);                                                                                       \
    else                                                                                                               \
        tile_dot(t, a, b)
/* Adds A B to the sums: of pairs of bf16 or, if `bytes`, of quads of signed bytes. Rows of A, and of B, are so many
 * bytes apart. B passes L1 by, which scores and weights need (0.93 of the time, MEASUREMENTS.md: AMX), but for bytes,
 * which vectors have just put there. */
INLINE void multiply(int bytes, int tall, int wide, const void *a, int64_t lda, const void *b0, const void *b1,
                     int64_t ldb) {
    tile_load(4, a, lda);
    LOAD_B(6, b0);
    DOT(0, 4, 6);
    if (wide) {
        LOAD_B(7, b1);
        DOT(1, 4, 7);
    }
    if (tall) {
        tile_load(5, (const char *)a + 16 * lda, lda);
        DOT(2, 5, 6);
    }
    if (tall && wide) {
        DOT(3, 5, 7);
    }
}
#undef LOAD_B
#undef DOT
