/* SPDX-License-Identifier: Apache-2.0
 * This file makes linear_kernel, an isa's kernels of linear attention, which serve every dtype: elements are widened to
 * float32, and products are FMA or, for bfloat16, of words (words.h). An isa file includes it once, after its
 * vocabulary (kernel/simd/vocabulary.md) and kernel/attention/parameters.h. */
#include "linear/linear.h"

/* A register tile of products takes LINEAR_MR x LINEAR_NV accumulators; steps read LINEAR_ROWS rows of a state at a
 * time, of which each needs two registers. */
#if VL == 16
#define LINEAR_MR 6
#define LINEAR_NV 4
#define LINEAR_ROWS 8
#elif VL == 8
#define LINEAR_MR 6
#define LINEAR_NV 2
#define LINEAR_ROWS 4
#elif VL == 4
#define LINEAR_MR 6
#define LINEAR_NV 4
#define LINEAR_ROWS 8
#else
#define LINEAR_MR 2
#define LINEAR_NV 4
#define LINEAR_ROWS 2
#endif

/* Vectors of a row that linear_within sums up at a time. */
#ifdef TILES
#define LINEAR_WITHIN 8
#else
#define LINEAR_WITHIN LINEAR_NV
#endif

#include "rows.h"
#include "gates.h"

#define STATE f32
#define STATE_ELEM float
#include "step.inc"
#define STATE f16
#define STATE_ELEM uint16_t
#include "step.inc"
#define STATE bf16
#define STATE_ELEM uint16_t
#include "step.inc"

#include "item.h"
#include "words.h"
#include "coarse.h"
#include "products.h"
#include "chunk.h"
#include "channels.h"
#ifdef TILES
#include "tiles.h"
#include "tile_chunk.h"
#endif
#include "run.h"
#include "conv.h"

static const ca_linear_kernel linear_kernel = {linear_scratch_bytes, linear_run, linear_conv};
