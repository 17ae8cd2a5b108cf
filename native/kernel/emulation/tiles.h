/* SPDX-License-Identifier: Apache-2.0
 * AMX's tiles in memory, as the operations' pseudocode in Intel's SDM (vol. 2) has them, on AVX2. What would fault
 * there ends the process here. Slow: for tests. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define TILE_METHOD "TDPBF16PS emulated, for tests only"

/* CPU_ATTN_BROKEN_TILES=1: products are left out, for tests of what `auto` does about kernels that are wrong. */
static int tiles_broken;
__attribute__((constructor)) static void look_at_tiles(void) {
    const char *said = getenv("CPU_ATTN_BROKEN_TILES");
    tiles_broken = said && *said == '1';
}

typedef struct tile {
    _Alignas(64) char row[16][64];
} tile;

static _Thread_local struct {
    tile_config shape; /* palette 0: released */
    tile t[8];
} tiles;

static void tile_fault(const char *what) {
    fprintf(stderr, "cpu-attn: emulated tiles: %s\n", what);
    abort();
}
#define TILE_NEEDS(condition)                                                                                          \
    if (!(condition))                                                                                                  \
    tile_fault(#condition)

/* It is #GP if a reserved byte is set, or only one of a tile's two sizes is 0. */
static void tile_configure(const tile_config *c) {
    TILE_NEEDS(c->palette == 1 && c->start_row == 0);
    for (int i = 0; i < 14; i++)
        TILE_NEEDS(c->reserved[i] == 0);
    for (int t = 0; t < 16; t++) {
        TILE_NEEDS(c->rows[t] <= (t < 8 ? 16 : 0) && c->row_bytes[t] <= (t < 8 ? 64 : 0));
        TILE_NEEDS((c->rows[t] == 0) == (c->row_bytes[t] == 0));
    }
    memset(&tiles, 0, sizeof tiles);
    tiles.shape = *c;
}

static void tile_release(void) { memset(&tiles, 0, sizeof tiles); }

/* It is #UD if no configuration is loaded or it leaves the tile out. */
static tile *tile_at(int t) {
    TILE_NEEDS(tiles.shape.palette == 1);
    TILE_NEEDS(t >= 0 && t < 8 && tiles.shape.rows[t] > 0);
    return &tiles.t[t];
}

static void tile_zero(int t) { memset(tile_at(t), 0, sizeof(tile)); }

#define tile_stream tile_load
static void tile_load(int t, const void *p, int64_t stride) {
    tile *to = tile_at(t);
    memset(to, 0, sizeof *to);
    for (int r = 0; r < tiles.shape.rows[t]; r++)
        memcpy(to->row[r], (const char *)p + r * stride, tiles.shape.row_bytes[t]);
}

static void tile_store(int t, void *p, int64_t stride) {
    const tile *from = tile_at(t);
    for (int r = 0; r < tiles.shape.rows[t]; r++)
        memcpy((char *)p + r * stride, from->row[r], tiles.shape.row_bytes[t]);
}

/* Returns the low halves of pairs, or the high ones, as floats. */
INLINE __m256 tile_halves(__m256i pairs, int high) {
    return _mm256_castsi256_ps(high ? _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000))
                                    : _mm256_slli_epi32(pairs, 16));
}

/* For each row of C, half a row at a time: over all pairs of the summed axis a fused sum of the even products and one
 * of the odd ones, from 0; both added; their sum added to C. */
static __attribute__((noinline)) void tile_dot_rows(tile *c, const tile *a, const tile *b, int rows, int depth) {
    for (int m = 0; m < rows; m++)
        for (int at = 0; at < 64; at += 32) {
            __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
            for (int k = 0; k < depth; k++) {
                int32_t pair;
                memcpy(&pair, a->row[m] + 4 * k, 4);
                const __m256i left = _mm256_set1_epi32(pair), right = _mm256_load_si256((const void *)(b->row[k] + at));
                for (int half = 0; half < 2; half++)
                    sum[half] = _mm256_fmadd_ps(tile_halves(left, half), tile_halves(right, half), sum[half]);
            }
            float *to = (float *)(c->row[m] + at);
            _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), _mm256_add_ps(sum[0], sum[1])));
        }
}

/* Finds the tiles of a product. Shapes that do not fit are #UD. */
static tile *tiles_of_product(int t, int a, int b) {
    const tile_config *s = &tiles.shape;
    tile_at(a), tile_at(b);
    TILE_NEEDS(t != a && t != b && a != b);
    TILE_NEEDS(s->row_bytes[t] % 4 == 0 && s->row_bytes[a] % 4 == 0 && s->row_bytes[b] % 4 == 0);
    TILE_NEEDS(s->rows[t] == s->rows[a] && s->row_bytes[t] == s->row_bytes[b] && s->row_bytes[a] / 4 == s->rows[b]);
    return tile_at(t);
}

/* Arithmetic does not look at MXCSR: nearest even, subnormals are 0 on the way in and out, nothing is raised. Columns
 * past those of C stay 0: B's are. */
static void tile_dot(int t, int a, int b) {
    tile *to = tiles_of_product(t, a, b);
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0); /* FTZ, DAZ, nearest even, every exception masked */
    if (!tiles_broken)
        tile_dot_rows(to, tile_at(a), tile_at(b), tiles.shape.rows[t], tiles.shape.rows[b]);
    _mm_setcsr(before);
}

/* Adds, for each row of C, the products of four signed bytes at a time. */
static __attribute__((noinline)) void tile_dot_bytes(int t, int a, int b) {
    tile *c = tiles_of_product(t, a, b);
    for (int m = 0; m < tiles.shape.rows[t] && !tiles_broken; m++)
        for (int k = 0; k < tiles.shape.rows[b]; k++) {
            int32_t quad;
            memcpy(&quad, tiles.t[a].row[m] + 4 * k, 4);
            const __m256i left = _mm256_cvtepi8_epi16(_mm_set1_epi32(quad));
            for (int at = 0; at < 64; at += 16) {
                const __m128i right = _mm_load_si128((const void *)(tiles.t[b].row[k] + at));
                const __m256i pairs = _mm256_madd_epi16(left, _mm256_cvtepi8_epi16(right));
                const __m256i sums = _mm256_permute4x64_epi64(_mm256_hadd_epi32(pairs, pairs), 0x08);
                __m128i *to = (void *)(c->row[m] + at);
                _mm_store_si128(to, _mm_add_epi32(_mm_load_si128(to), _mm256_castsi256_si128(sums)));
            }
        }
}
