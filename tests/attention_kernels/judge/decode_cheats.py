"""Backends that cheat when they decode; see cheats.py."""

from __future__ import annotations

import torch

from tests.attention_kernels.judge.cheats import decode, right_decode, upside_down


@decode("decode")
def decode_ignores_the_lengths(q, k, v, seqlens, scale):
    return right_decode(q, k, v, torch.full_like(seqlens, k.shape[1]), scale)


@decode("decode", slow=True)
def decode_takes_the_longest_for_all(q, k, v, seqlens, scale):
    return right_decode(q, k, v, torch.full_like(seqlens, int(seqlens.max())), scale)


@decode("decode.*softmax_scale")
def decode_ignores_the_scale(q, k, v, seqlens, scale):
    return right_decode(q, k, v, seqlens, q.shape[3] ** -0.5)


@decode("decode", slow=True)
def decode_forgets_keys_beyond_70(q, k, v, seqlens, scale):
    return right_decode(q, k[:, :70], v[:, :70], seqlens.clamp(max=70), scale)


@decode("decode", slow=True)
def decode_forgets_the_newest_key(q, k, v, seqlens, scale):
    return right_decode(q, k, v, (seqlens - 1).clamp(min=1), scale)


@decode("decode.*129")
def decode_forgets_the_first_key_of_a_split(q, k, v, seqlens, scale):
    return right_decode(q, k, v, seqlens - (seqlens == 129).int(), scale)


@decode("decode.*12 heads", slow=True)
def decode_reverses_twelve_heads(q, k, v, seqlens, scale):
    o = right_decode(q, k, v, seqlens, scale)
    return upside_down(o) if q.shape[2] == 12 else o


@decode("it changed its input seqlens")
def decode_counts_up_the_lengths(q, k, v, seqlens, scale):
    o = right_decode(q, k, v, seqlens, scale)
    seqlens += 1
    return o


@decode("it changed its input k_cache", slow=True)
def decode_clears_the_cache_past_the_lengths(q, k, v, seqlens, scale):
    o = right_decode(q, k, v, seqlens, scale)
    for row, length in enumerate(seqlens.tolist()):
        k[row, length:] = 0
    return o


@decode("decode.*layout")
def decode_takes_the_cache_to_be_contiguous(q, k, v, seqlens, scale):
    return right_decode(q, k.as_strided(k.shape, k[:].contiguous().stride()), v, seqlens, scale)
