"""Copies between device pools (layer first) and host pools (page first).

Torch forms of the copies that SGLang's ``sgl_kernel.kvcacheio`` makes on a GPU. Indices are token slots; with
page size 1 (recurrent states) a slot is a page. Host layouts: page_first_direct [pages, layers, page_size,
...] and page_first [slots, layers, ...], whose copies are given addresses and sizes in bytes.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


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


def load_rows(
    host: Tensor, layer_rows: Tensor, source: Tensor, target: Tensor, layer: int, row_bytes: int
) -> None:
    """Copy one layer of a page_first host tensor to its device tensor.

    Args:
        host: [slots, layers, ...], contiguous.
        layer_rows: [slots, ...] of the layer ``layer``, contiguous.
        source: [N] host slots.
        target: [N] device slots.
        layer: index on the host's layer axis.
        row_bytes: bytes of one layer's row.
    """
    rows = _as_rows(host, row_bytes).view(host.shape[0], -1, row_bytes)
    _as_rows(layer_rows, row_bytes)[target.long()] = rows[source.long(), layer]


def save_rows(addresses: Tensor, host: Tensor, source: Tensor, target: Tensor, row_bytes: int) -> None:
    """Copy all layers of device tensors, known by their addresses, to a page_first host tensor.

    Args:
        addresses: [layers] uint64, where each layer's contiguous rows begin.
        host: [slots, layers, ...], contiguous.
        source: [N] device slots.
        target: [N] host slots.
        row_bytes: bytes of one layer's row.
    """
    s, t = source.long(), target.long()
    if s.numel() == 0:
        return
    rows = _as_rows(host, row_bytes).view(host.shape[0], -1, row_bytes)
    extent = (int(s.max()) + 1) * row_bytes
    for layer, address in enumerate(addresses.tolist()):
        memory = (ctypes.c_uint8 * extent).from_address(address)
        device = torch.frombuffer(memory, dtype=torch.uint8).view(-1, row_bytes)
        rows[t, layer] = device[s]


def _as_rows(tensor: Tensor, row_bytes: int) -> Tensor:
    """View a contiguous tensor as [rows, row_bytes] uint8."""
    return tensor.view(-1).view(torch.uint8).view(-1, row_bytes)
