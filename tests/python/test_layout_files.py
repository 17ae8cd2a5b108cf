# SPDX-License-Identifier: Apache-2.0
"""Caches as files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cpu_attn import CacheDescriptor, PagedKVCache

from ..cases.formats import numpy_dtype
from ..harness.layout_caches import NARROW, contents, filled, scales_for


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *NARROW])
def test_files(tmp_path: Path, dtype: str, kv_cache_dtype: str) -> None:
    scales = scales_for(kv_cache_dtype, 0.37, 2.5)
    cache, _, _ = filled(dtype, kv_cache_dtype=kv_cache_dtype, **scales)
    file = tmp_path / "cache.safetensors"
    cache.save(file)
    loaded = PagedKVCache.load(file)
    assert loaded.descriptor == cache.descriptor
    for a, b in ((cache.key_cache, loaded.key_cache), (cache.value_cache, loaded.value_cache)):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    loaded.update(*(np.zeros((1, 2, n), numpy_dtype(dtype)) for n in (24, 7)), np.zeros(1, np.int64))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["HND", "NHD"])
def test_files_of_plain_rows(tmp_path: Path, kv_cache_dtype: str, name: str) -> None:
    cache, _, _ = filled("bfloat16", kv_cache_dtype=kv_cache_dtype, kv_cache_layout=name)
    cache.save(tmp_path / "file")
    loaded = PagedKVCache.load(tmp_path / "file")
    assert loaded.descriptor == cache.descriptor and loaded.kv_cache_layout == name
    assert [x.tobytes() for x in contents(loaded)] == [x.tobytes() for x in contents(cache)]


@pytest.mark.integrations
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *NARROW])
def test_torch_reads_files(tmp_path: Path, dtype: str, kv_cache_dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    cache, _, _ = filled(dtype, kv_cache_dtype=kv_cache_dtype, **scales_for(kv_cache_dtype, 0.37, 2.5))
    cache.save(tmp_path / "cache.safetensors")
    theirs = load_file(tmp_path / "cache.safetensors")["key_cache"]
    assert str(theirs.dtype).removeprefix("torch.") == cache.key_cache.dtype.name
    assert theirs.view(torch.uint8).numpy().tobytes() == cache.key_cache.tobytes()


@pytest.mark.parametrize("kept", [3, 40, 0.3, 0.99])
def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float) -> None:
    """After safetensors has found it to be sound; kept: bytes, or a part of all."""
    cache, _, _ = filled("float32")
    file = tmp_path / "cache.safetensors"
    cache.save(file)
    sound = CacheDescriptor.from_json

    def cut(said: str) -> CacheDescriptor:
        os.truncate(file, int(kept if kept > 1 else kept * file.stat().st_size))
        return sound(said)

    monkeypatch.setattr(CacheDescriptor, "from_json", cut)
    with pytest.raises(ValueError, match=f"{file}: ends before its tensors do"):
        PagedKVCache.load(file)


def test_files_of_somebody_else(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    cache, _, _ = filled("float32")
    arrays = {"key_cache": cache.key_cache, "value_cache": cache.value_cache}
    said = {"cpu_attn": cache.descriptor.to_json()}
    file = tmp_path / "file"
    for tensors, metadata, words in [
        (arrays, None, "not written by"),
        ({"key_cache": cache.key_cache}, said, "not written by"),
        (arrays, {"cpu_attn": "{}"}, "version: "),
        (arrays, {"cpu_attn": "[" * 10**6}, "descriptor: no JSON"),
        ({**arrays, "key_cache": cache.key_cache.astype(np.float16)}, said, "key_cache: holds F16"),
        ({**arrays, "key_cache": cache.key_cache[:4]}, said, "key_cache: axis 0 is 4"),
    ]:
        save_file(tensors, file, metadata=metadata)
        with pytest.raises(ValueError, match=words):
            PagedKVCache.load(file)
    for junk in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}" * 3, bytes(100)):
        file.write_bytes(junk)
        with pytest.raises(ValueError, match=str(file)):
            PagedKVCache.load(file)
    with pytest.raises(FileNotFoundError):
        PagedKVCache.load(tmp_path / "nowhere")
    with pytest.raises(OSError, match=r"device|directory"):
        PagedKVCache.load(tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        cache.save(tmp_path / "nowhere" / "cache.safetensors")
