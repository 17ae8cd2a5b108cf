# SPDX-License-Identifier: Apache-2.0
"""cpu-attn for vLLM: the plugin that puts this library in the place of its CPU attention."""
