# SPDX-License-Identifier: Apache-2.0
"""cpu-attn for torch: a provider for its paged attention API, and the calls as ops of torch.library."""
