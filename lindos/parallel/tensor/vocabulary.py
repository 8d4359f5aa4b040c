"""Cross-entropy over logits whose vocabulary is cut, chunked over tokens. No fp32 copy of the logits is ever whole.

Each rank takes the log-sum-exp of its own part; one small gather of (log-sum-exp, logit of the label) over tp makes the
whole one. The backward makes each chunk's probabilities again from the kept log-sum-exp.

Legend: N tokens, V vocabulary, L its local part (padding included).
"""

from __future__ import annotations

from typing import Any

import torch

from lindos.comm.world import World
from lindos.core.mesh import Axes

IGNORED = -100
CHUNK_ELEMENTS = 1 << 19  # elements of one fp32 chunk of logits: 2 MiB, which stays in the cache of a core


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NL: torch.Tensor, labels_N: torch.Tensor, world: World, axes: Axes, start: int, real: int
    ) -> torch.Tensor:
        wide = torch.promote_types(logits_NL.dtype, torch.float32)
        local_N = labels_N - start
        here_N = (local_N >= 0) & (local_N < real)
        index_N = local_N.clamp(0, max(real - 1, 0))
        pair_2N = torch.empty(2, labels_N.numel(), dtype=wide, device=logits_NL.device)
        for a, b in _chunks(logits_NL):
            chunk = logits_NL[a:b, :real].to(wide)
            torch.logsumexp(chunk, 1, out=pair_2N[0, a:b])
            pair_2N[1, a:b] = chunk.gather(1, index_N[a:b, None])[:, 0].masked_fill(~here_N[a:b], 0)
        parts_R2N = world.all_gather(pair_2N[None], axes, 0, "loss") if world.mesh.size(axes) > 1 else pair_2N[None]
        whole_N = torch.logsumexp(parts_R2N[:, 0], 0)
        counted_N = labels_N != IGNORED
        losses_N = (whole_N - parts_R2N[:, 1].sum(0)).masked_fill(~counted_N, 0)
        ctx.save_for_backward(logits_NL, whole_N, index_N, here_N & counted_N, counted_N)
        ctx.real = real
        return losses_N

    @staticmethod
    def backward(ctx: Any, dlosses_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_NL, whole_N, index_N, here_N, counted_N = ctx.saved_tensors
        dlogits_NL = torch.empty_like(logits_NL)
        scale_N = dlosses_N.masked_fill(~counted_N, 0)
        for a, b in _chunks(logits_NL):
            chunk = logits_NL[a:b, : ctx.real].to(whole_N.dtype)
            chunk = (
                chunk.sub_(whole_N[a:b, None])
                if chunk.data_ptr() != logits_NL[a:b].data_ptr()
                else chunk - whole_N[a:b, None]
            )
            chunk.exp_()
            chunk.scatter_add_(1, index_N[a:b, None], -here_N[a:b, None].to(chunk.dtype))
            dlogits_NL[a:b, : ctx.real] = chunk.mul_(scale_N[a:b, None])
            dlogits_NL[a:b, ctx.real :] = 0
        return dlogits_NL, None, None, None, None, None


def _chunks(logits_NL: torch.Tensor) -> list[tuple[int, int]]:
    elements = CHUNK_ELEMENTS if logits_NL.device.type == "cpu" else 1 << 26
    rows = max(1, elements // max(1, logits_NL.shape[1]))
    return [(a, min(a + rows, logits_NL.shape[0])) for a in range(0, logits_NL.shape[0], rows)]


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, world: World, axes: Axes, vocabulary: int
) -> torch.Tensor:
    """Loss of every position, zero where the label is -100; in fp32, or fp64 for fp64 logits.

    Args:
        logits: [..., L], this rank's part of the vocabulary.
        labels: [...], aligned with the logits (shifted already), -100 where nothing is predicted.
        axes: axes that cut the vocabulary; a group of one rank means whole logits.
        vocabulary: V, without padding.

    Communicates: all_gather of 2 numbers a token over axes in forward; nothing in backward.
    """
    size = logits.shape[-1]
    parts = world.mesh.size(axes)
    start = size * world.mesh.coordinate(axes) if parts > 1 else 0
    real = max(0, min(size, vocabulary - start))
    losses = _CrossEntropy.apply(logits.reshape(-1, size), labels.reshape(-1), world, axes, start, real)
    return losses.view(labels.shape)
