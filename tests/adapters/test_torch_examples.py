# SPDX-License-Identifier: Apache-2.0
"""examples/torch_paged.py: what runs with cpu-attn says the same as what runs without."""

from __future__ import annotations

import pytest

from ..harness.snippets import printed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations


def test_paged() -> None:
    try:
        found = printed("torch_paged", "--chats", "3", "--prompt", "140", "--new", "4", "--layers", "1")
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert [line.split()[0] for line in found] == ["with_sdpa", "with_cpu_attn", "the"]
    assert found[-1] == "the same tokens"
