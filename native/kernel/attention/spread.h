/* SPDX-License-Identifier: Apache-2.0
 * This is the dither of weights that are rounded. Without it many weights that are small and alike would all be rounded
 * to the same side. It takes parameters.h. */
#ifndef CPU_ATTN_SPREAD_H
#define CPU_ATTN_SPREAD_H

/* SPREAD(k) is the dither of the k-th weight, ((37 k) mod 64 + 1/2) / 64 - 1/2. Among odd factors 37 is one of those
 * whose sums over every second, third, ... 32nd key stay smallest; with van der Corput's order a V of alternating signs
 * took 13 times the error budget. A weight of 0 stays 0. */
#define SPREAD(k) ((37 * (k)) % 64 + 0.5f) / 64 - 0.5f
#define SPREAD_4(k) SPREAD(k), SPREAD((k) + 1), SPREAD((k) + 2), SPREAD((k) + 3)
#define SPREAD_16(k) SPREAD_4(k), SPREAD_4((k) + 4), SPREAD_4((k) + 8), SPREAD_4((k) + 12)
static const float spread[4 * CA_LANES] = {SPREAD_16(0), SPREAD_16(16), SPREAD_16(32), SPREAD_16(48)};
#endif
