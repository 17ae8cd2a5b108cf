/* SPDX-License-Identifier: Apache-2.0
 * This file puts tasks in the order in which threads take them where memory lies on several NUMA nodes: those of node
 * 0 first, then those of node 1, and so on. A task is of the node on which most of the blocks lie that it reads. */
#include "check/check.h"
#include "plan.h"
#include <stdlib.h>

/* Returns the node of the task, or -1 where a block's node is out of range. A caller who changes `nodes` meanwhile gets
 * another order, so each of them is read once. */
static int node_of(const ca_plan *p, const ca_task *task, const ca_indices *indices, const ca_array *nodes,
                   ca_fault *fault) {
    const volatile int32_t *node_of_block = (const int32_t *)nodes->address;
    const int64_t size = ca_segment_keys(p->seq_lens[task->request]), block_size = p->shape.block_size;
    int64_t votes[CA_NODES] = {0}, k0, k1;
    int most = 0;
    ca_task_keys(p, task, &k0, &k1);
    k0 = ca_max64(k0, task->segment * size);
    k1 = ca_min64(k1, (task->segment + (int64_t)task->num_segments) * size);
    for (int64_t i = k0 / block_size; i * block_size < k1; i++) {
        const int32_t block = indices->blocks[indices->table_at[task->request] + i], node = node_of_block[block];
        if (node < 0 || node >= CA_NODES) {
            ca_fail(fault, CA_BAD_NODE, -1, block, node, CA_NODES);
            return -1;
        }
        votes[node]++;
        if (votes[node] > votes[most])
            most = node;
    }
    return most;
}

/* Sorts the tasks by their nodes; those of one node keep their order. */
static void sort_tasks(ca_plan *p, ca_task *sorted, const uint8_t *node) {
    memset(p->first_task, 0, sizeof p->first_task);
    for (int64_t i = 0; i < p->num_tasks; i++)
        p->first_task[node[i] + 1]++;
    for (int n = 0; n < CA_NODES; n++) {
        p->num_nodes = p->first_task[n + 1] ? n + 1 : p->num_nodes;
        p->first_task[n + 1] += p->first_task[n];
    }
    int64_t next[CA_NODES];
    memcpy(next, p->first_task, sizeof next);
    for (int64_t i = 0; i < p->num_tasks; i++)
        sorted[next[node[i]]++] = p->tasks[i];
    memcpy(p->tasks, sorted, (size_t)p->num_tasks * sizeof *sorted);
}

int ca_order_by_node(ca_plan *p, const ca_array *table, const ca_array *nodes, ca_fault *fault) {
    const ca_array none = {0};
    ca_indices indices;
    ca_task *sorted = malloc((size_t)p->num_tasks * (sizeof *sorted + 1) + 1);
    if (!sorted)
        return CA_NO_MEMORY;
    uint8_t *node = (uint8_t *)(sorted + p->num_tasks);
    int status = ca_take_indices(p, table, &none, &none, nodes->shape[0], p->shape.block_size, &indices, fault);
    for (int64_t i = 0; i < p->num_tasks && !status; i++) {
        const int n = node_of(p, &p->tasks[i], &indices, nodes, fault);
        status = n < 0 ? CA_BAD_NODE : CA_OK;
        node[i] = (uint8_t)n;
    }
    if (!status)
        sort_tasks(p, sorted, node);
    ca_give_back(indices.memory, indices.few);
    free(sorted);
    return status;
}
