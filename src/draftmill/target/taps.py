"""Forward hooks that copy the outputs of chosen decoder layers into one tensor.

Layer id l is the output of 0-based decoder layer l: the residual stream before the final norm. For every id but the
last this is Hugging Face's `hidden_states[l + 1]`; that list's last entry is already normed, a hook's is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class _LastTapDone(Exception):
    """Leaves the forward pass: no layer after the last tapped one is needed."""


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Raises ValueError unless the ids rise strictly within the model's layers."""
    ids = tuple(layer_ids)
    if not ids:
        raise ValueError("target.feature_layers is empty: name at least one layer")
    if outside := [layer for layer in ids if not 0 <= layer < num_layers]:
        raise ValueError(
            f"target.feature_layers {list(ids)}: {outside} not among the target's {num_layers} layers, "
            f"valid ids are 0 to {num_layers - 1} (id l is the output of 0-based layer l, before the final norm)"
        )
    if list(ids) != sorted(set(ids)):
        raise ValueError(
            f"target.feature_layers {list(ids)} must rise without repetition, "
            f"since features are concatenated in id order: use {sorted(set(ids))}"
        )
    return ids


@contextmanager
def tapped(layers: nn.ModuleList, layer_ids: tuple[int, ...], sink: Tensor, *, stop: bool) -> Iterator[None]:
    """While open, a forward pass fills `sink` [.., n*H], the layers' outputs side by side in id order.

    With `stop` the pass ends right after the last tapped layer. The copy is made inside the hook, so nothing that
    a later layer does in place can reach it. No hook outlives the block.
    """
    width = sink.shape[-1] // len(layer_ids)
    filled = 0

    def hook_for(index: int, last: bool) -> Any:
        def copy_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            nonlocal filled
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.shape != (*sink.shape[:-1], width):  # never pad or cut: rows would part from their tokens
                raise RuntimeError(
                    f"layer {layer_ids[index]} gave features {tuple(hidden.shape)}, "
                    f"expected {(*sink.shape[:-1], width)}: the rows would no longer belong to their tokens"
                )
            sink[..., index * width : (index + 1) * width].copy_(hidden)
            filled += 1
            if stop and last:
                raise _LastTapDone

        return copy_output

    hooks = [
        layers[layer].register_forward_hook(hook_for(index, layer == layer_ids[-1]))
        for index, layer in enumerate(layer_ids)
    ]
    try:
        yield
    except _LastTapDone:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if filled != len(layer_ids):
        raise RuntimeError(f"{filled} of the {len(layer_ids)} tapped layers ran: the model skipped a layer")
