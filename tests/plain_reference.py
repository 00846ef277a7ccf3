"""The drafter and its objective in plain float64 loops, from the formulas alone. Shares no code with the package.

One block at a time, one slot at a time, one head at a time: slow and obvious on purpose.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class PlainDocument:
    token_ids: list[int]
    supervised: list[bool]
    features: torch.Tensor  # float64 [T, n * H]


@dataclass
class PlainLayer:
    sliding: bool
    causal: bool
    window: int | None


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rope(vector, position, theta):
    half = len(vector) // 2
    out = [None] * len(vector)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        x, y = vector[i], vector[i + half]
        out[i] = x * math.cos(angle) - y * math.sin(angle)
        out[i + half] = x * math.sin(angle) + y * math.cos(angle)
    return torch.stack(out)


def sees_context(layer, anchor, slot, key):
    if key >= anchor:
        return False
    return not (layer.sliding and key <= anchor + slot - layer.window)


def sees_slot(layer, slot, other):
    return other <= slot if layer.causal else True


class PlainDrafter:
    """`weights`: float64 tensors by the published names; `sizes`: the DrafterSpec, read for numbers only."""

    def __init__(self, weights, sizes, embedding, head):
        self.w, self.s, self.embedding, self.head = weights, sizes, embedding, head
        self.layers = [
            PlainLayer(
                kind == "sliding_attention",
                sizes.causal_sliding if kind == "sliding_attention" else sizes.causal_full,
                sizes.sliding_window if kind == "sliding_attention" else None,
            )
            for kind in sizes.layer_types
        ]

    def block_logits(self, document, anchor):
        """Logits of slots 1..B-1 for the block at `anchor` (position in the document)."""
        s, eps = self.s, self.s.rms_norm_eps
        context = [
            rms(self.w["fc.weight"] @ document.features[c], self.w["hidden_norm.weight"], eps) for c in range(anchor)
        ]
        tokens = [document.token_ids[anchor]] + [s.mask_token_id] * (s.block_size - 1)
        x = [self.embedding[t] for t in tokens]
        for index, layer in enumerate(self.layers):
            x = self._layer(f"layers.{index}.", layer, x, context, anchor)
        return [self.head @ rms(row, self.w["norm.weight"], eps) for row in x[1:]]

    def _layer(self, prefix, layer, x, context, anchor):
        s, eps, w = self.s, self.s.rms_norm_eps, self.w
        inner = [rms(row, w[prefix + "input_layernorm.weight"], eps) for row in x]
        rows = [(c, context[c]) for c in range(anchor)] + [(anchor + j, inner[j]) for j in range(s.block_size)]
        keys = [self._heads(prefix + "self_attn.k", row, p, s.num_key_value_heads) for p, row in rows]
        values = [(w[prefix + "self_attn.v_proj.weight"] @ row).view(s.num_key_value_heads, -1) for _, row in rows]
        out = []
        for slot in range(s.block_size):
            query = self._heads(prefix + "self_attn.q", inner[slot], anchor + slot, s.num_attention_heads)
            seen = [c for c in range(anchor) if sees_context(layer, anchor, slot, c)]
            seen += [anchor + j for j in range(s.block_size) if sees_slot(layer, slot, j)]
            heads = []
            for n in range(s.num_attention_heads):
                g = n * s.num_key_value_heads // s.num_attention_heads
                scores = torch.stack([query[n] @ keys[i][g] / math.sqrt(s.head_dim) for i in seen])
                shares = torch.softmax(scores, 0)
                heads.append(sum(shares[j] * values[i][g] for j, i in enumerate(seen)))
            y = x[slot] + w[prefix + "self_attn.o_proj.weight"] @ torch.cat(heads)
            z = rms(y, w[prefix + "post_attention_layernorm.weight"], eps)
            gate, up = w[prefix + "mlp.gate_proj.weight"] @ z, w[prefix + "mlp.up_proj.weight"] @ z
            out.append(y + w[prefix + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        return out

    def _heads(self, name, row, position, count):
        flat = (self.w[name + "_proj.weight"] @ row).view(count, -1)
        norm = self.w[name + "_norm.weight"]
        return [rope(rms(head, norm, self.s.rms_norm_eps), position, self.s.rope_theta) for head in flat]


def counted_slots(document, anchor, block_size):
    """How many of slots 1..B-1 count: the run of supervised tokens from the anchor on, inside the document."""
    count = 0
    if not document.supervised[anchor]:
        return 0
    for k in range(1, block_size):
        if anchor + k >= len(document.token_ids) or not document.supervised[anchor + k]:
            break
        count += 1
    return count


def weights_of(cross_entropies, kind, gamma, alpha):
    """Slot weights of one block's counted slots, from the papers' formulas."""
    if kind == "decay":
        return [math.exp(-k / gamma) for k in range(len(cross_entropies))]
    q = [(1 - alpha) * math.exp(-float(ce)) + alpha for ce in cross_entropies]
    prefix = [math.prod(q[: m + 1]) for m in range(len(q))]
    return [sum(prefix[j:]) for j in range(len(q))]


def plain_loss(drafter, documents_and_anchors, kind, gamma, alpha=0.5):
    """(sum of weight * CE, sum of weights) over [(document, anchors)]."""
    numerator, denominator = 0.0, 0.0
    for document, anchors in documents_and_anchors:
        for anchor in anchors:
            count = counted_slots(document, anchor, drafter.s.block_size)
            logits = drafter.block_logits(document, anchor)
            ces = [torch.logsumexp(logits[k], 0) - logits[k][document.token_ids[anchor + k + 1]] for k in range(count)]
            for weight, ce in zip(weights_of(ces, kind, gamma, alpha), ces, strict=True):
                numerator = numerator + weight * ce
                denominator += weight
    return numerator, denominator
