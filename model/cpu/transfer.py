"""Copies between device pools (layer first) and host pools (page first).

Torch forms of the copies that SGLang's ``sgl_kernel.kvcacheio`` makes on a GPU. Indices are token slots; with
page size 1 (recurrent states) a slot is a page.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_slots(sources: Sequence[Tensor], targets: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """Copy slots between tensors [slots, ...] of the same layout, pair by pair."""
    s, t = source.long(), target.long()
    for a, b in zip(sources, targets, strict=True):
        b[t] = a[s].to(b.dtype)


def load_layer(
    hosts: Sequence[Tensor],
    layers: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    layer: int,
    page_size: int,
) -> None:
    """Copy one layer of page-first host tensors to its layer-first device tensors.

    Args:
        hosts: [pages, layers, page_size, ...] each.
        layers: [slots, ...] each, of the layer ``layer``.
        source: [N] host slots; slot s lies in page s // page_size.
        target: [N] device slots.
        layer: index on the hosts' layer axis.
        page_size: tokens of a page.
    """
    s, t = source.long(), target.long()
    page, offset = torch.div(s, page_size, rounding_mode="floor"), s % page_size
    for host, device in zip(hosts, layers, strict=True):
        device[t] = host[page, layer, offset].reshape(t.shape[0], *device.shape[1:])


def save_layers(
    layers: Sequence[Tensor], hosts: Sequence[Tensor], source: Tensor, target: Tensor, page_size: int
) -> None:
    """Copy all layers of layer-first device tensors to page-first host tensors.

    Args:
        layers: len(hosts) groups of L tensors [slots, ...], one group per host tensor.
        hosts: [pages, L, page_size, ...] each.
        source: [N] device slots.
        target: [N] host slots.
        page_size: tokens of a page.
    """
    s, t = source.long(), target.long()
    page, offset = torch.div(t, page_size, rounding_mode="floor"), t % page_size
    per_host = len(layers) // len(hosts)
    for j, host in enumerate(hosts):
        for layer in range(per_host):
            rows = layers[j * per_host + layer][s]
            host[page, layer, offset] = rows.reshape(t.shape[0], *host.shape[3:])
