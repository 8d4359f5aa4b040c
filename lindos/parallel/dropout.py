"""Dropout that is the same under every plan: each element is kept or not by a hash of what it is, not of where.

The key is (seed, step, place in the model, sample, token, feature), all as the whole run counts them: a rank hashes
only the elements that it holds. Integer hashing in int32 costs less here than torch's own generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lindos.comm.seeds import seed_of
from lindos.core.errors import RefusedError


def _i32(x: int) -> int:
    return (x & 0xFFFFFFFF) - (1 << 32 if x & 0x80000000 else 0)


_A, _B, _C = _i32(0x9E3779B1), _i32(0x85EBCA6B), _i32(0xC2B2AE35)


def _mix(h: torch.Tensor) -> torch.Tensor:
    """A finaliser in int32: every input bit reaches every output bit. Changes h in place."""
    h ^= (h >> 16) & 0xFFFF
    h *= _B
    h ^= (h >> 13) & 0x7FFFF
    h *= _C
    h ^= (h >> 16) & 0xFFFF
    return h


def keep_mask(
    key: int, samples: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor, probability: float
) -> torch.Tensor:
    """Boolean [samples, tokens, features], true with 1 - probability, a function of the indices alone."""
    rows = _mix(samples.int()[:, None] * _A + _i32(key))
    rows = _mix(rows + tokens.int()[None, :] * _A)
    mixed = _mix(rows[..., None] + features.int() * _A)
    return (mixed & 0x7FFFFFFF) >= int(probability * (1 << 31))


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class Dropout(TorchFunctionMode):
    """While active, dropout calls of the model are keyed.

    Attributes:
        seed, step: of the run.
        first_row: index of this call's first row among all rows of the step, over all dp ranks.
        rows, length: rows and tokens of the call.
        inner: where the tensor stands: None on the residual stream, else (first feature, first head) of this rank.
    """

    def __init__(self, seed: int, inner: Callable[[], tuple[int, int] | None]) -> None:
        super().__init__()
        self.seed, self.step, self.inner = seed, 0, inner
        self.first_row = self.rows = self.length = 0
        self.place, self.count = "", 0
        self.active = 0

    def watch(self, model: nn.Module) -> None:
        """Follow the model's blocks, so that a recomputed block counts its dropouts anew."""
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList):
                for i, block in enumerate(module):
                    block.register_forward_pre_hook(lambda *_, at=f"{name}.{i}": self._at(at))
                    block.register_forward_hook(lambda *_, at=f"after {name}.{i}": self._at(at))

    def begin(self, step: int, first_row: int, rows: int, length: int) -> None:
        self.step, self.first_row, self.rows, self.length = step, first_row, rows, length
        self._at("start")

    def _at(self, place: str) -> None:
        self.place, self.count = place, 0

    def replay(self) -> Callable[[], AbstractContextManager[None]]:
        """For code that will run again: a block in which dropout is what it is now, whatever was dropped since."""
        active = self.active
        now = (self.step, self.first_row, self.rows, self.length, self.place, self.count)

        @contextmanager
        def again() -> Iterator[None]:
            before = (self.step, self.first_row, self.rows, self.length, self.place, self.count)
            self.step, self.first_row, self.rows, self.length, self.place, self.count = now
            try:
                with self if active else nullcontext():  # a mode around backward() itself is off inside it
                    yield
            finally:
                self.step, self.first_row, self.rows, self.length, self.place, self.count = before

        return again

    def __enter__(self) -> Dropout:
        self.active += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.active -= 1
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout or func is torch.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            given = {**dict(zip(_SDPA, args)), **kwargs}
            if given.get("dropout_p", 0.0) > 0:
                return self._attention(given)
        return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return input
        if p >= 1:
            return input * 0
        kept = self._mask(input, p)
        return input * kept.to(input.dtype).mul_(1 / (1 - p))

    def _mask(self, x: torch.Tensor, p: float) -> torch.Tensor:
        self.count += 1
        key = seed_of(self.seed, "dropout", self.step, self.place, self.count)
        inner = self.inner()

        def index(first: int, count: int) -> torch.Tensor:
            return torch.arange(first, first + count, device=x.device)

        if x.dim() == 4 and x.shape[0] == self.rows:  # probabilities of attention: [rows, heads, queries, keys]
            heads, queries, keys = x.shape[1:]
            first = (inner[1] if inner else 0) * queries * keys
            mask = keep_mask(
                key, index(self.first_row, self.rows), index(0, 1), index(first, heads * queries * keys), p
            )
            return mask.view(x.shape)
        first = inner[0] if inner else 0
        if x.dim() >= 2 and x.shape[0] == self.rows:
            tokens = x.shape[1] if x.dim() > 2 else 1
            features = x[0, 0].numel() if x.dim() > 2 else x.shape[1]
            return keep_mask(key, index(self.first_row, self.rows), index(0, tokens), index(first, features), p).view(
                x.shape
            )
        if x.dim() == 2 and x.shape[0] == self.rows * self.length:
            samples, tokens = index(self.first_row, self.rows), index(0, self.length)
            return keep_mask(key, samples, tokens, index(first, x.shape[1]), p).view(x.shape)
        raise RefusedError(
            f"dropout of a tensor {list(x.shape)} at {self.place!r}: it must lead with the {self.rows} rows of "
            f"the batch "
            "to be the same under every plan. Set this dropout to 0."
        )

    def _attention(self, given: dict[str, Any]) -> torch.Tensor:
        """The eager product of scaled_dot_product_attention's arguments: fused kernels draw their own numbers."""
        query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        if key.shape[1] != query.shape[1]:
            ratio = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
        scale = given.get("scale")
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if given.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = torch.softmax(scores, -1, dtype=wide).nan_to_num(0.0).to(query.dtype)
        return self._dropout(weights, given["dropout_p"]) @ value


def refuse_unkeyed(model: nn.Module) -> None:
    """Randomness that torch draws by itself would differ between plans.

    Raises:
        RefusedError: names the module or the option.
    """
    unkeyed = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    for name, module in model.named_modules():
        attention = isinstance(module, nn.MultiheadAttention) and module.dropout > 0
        if attention or (isinstance(module, unkeyed) and module.p > 0):
            raise RefusedError(f"{name} ({type(module).__name__}) drops by numbers of its own. Set its dropout to 0.")
    for key, value in fields_of(getattr(model, "config", None)):
        drawn = any(word in key for word in ("layerdrop", "jitter", "drop_path", "apply_spec_augment"))
        if drawn and isinstance(value, int | float) and value > 0:
            raise RefusedError(f"config.{key}={value} draws numbers that differ between plans. Set it to 0.")


def has_dropout(model: nn.Module) -> bool:
    """Whether a forward in training could drop anything; a model without a configuration may always."""
    if not hasattr(model, "config"):
        return True
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
        return True
    fields = fields_of(getattr(model, "config", None))
    return any("drop" in key.lower() and isinstance(value, int | float) and value > 0 for key, value in fields)


def fields_of(config: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of the fields of a configuration, those inside it too."""
    stack: list[tuple[str, Any]] = [("", config.to_dict() if hasattr(config, "to_dict") else {})]
    while stack:
        prefix, fields = stack.pop()
        for name, value in fields.items():
            if isinstance(value, dict):
                stack.append((f"{prefix}{name}.", value))
            else:
                yield f"{prefix}{name}", value
