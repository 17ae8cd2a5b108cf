# SPDX-License-Identifier: Apache-2.0
"""cpu-attn for Hugging Face transformers: attention, masks, paged caches, continuous batching."""
