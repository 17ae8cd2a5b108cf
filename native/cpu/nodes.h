/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CPU_ATTN_NODES_H
#define CPU_ATTN_NODES_H

/* Returns the NUMA node on which this thread runs, as ca_set_cpu_nodes was told; 0 where it was told nothing. A thread
 * that nobody has bound may run elsewhere at any time. */
int ca_node_here(void);
#endif
