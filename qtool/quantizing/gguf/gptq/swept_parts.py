"""Which matrices of a block GPTQ's sweep takes, by the input that they read, and in which order."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from qtool.calibrating.sites import BlockSites, Site
from qtool.cuda.device import Device
from qtool.gguf.importance.measured import matrices_reading
from qtool.gguf.pieces import matrices_of
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import SourceTensor
from qtool.quantizing.gguf.gptq.swept_files import SweptFiles
from qtool.quantizing.gguf.gptq.swept_site import Part


def parts_of(files: SweptFiles, index: int, found: BlockSites) -> dict[str, list[Part]]:
    """The matrices of a block that are swept, by the id of the site that they read; where they lie
    in the block's file is noted."""
    by_name: dict[str, dict[int, Site]] = defaultdict(dict)
    for site in found.sites:
        for name in site.names:
            by_name[name][-1 if site.expert is None else site.expert] = site
    parts: dict[str, list[Part]] = defaultdict(list)
    start = 0
    for tensor in files.tensors.get(index, ()):
        sites = matrices_reading(tensor.source, by_name, lambda site: site.in_features)
        if not is_in_order(tensor.source):
            sites = []
        matrices, nbytes = sizes(tensor)
        for matrix, site in enumerate(sites):
            parts[site.id].append(Part(tensor, matrix, start + matrix * nbytes))
        if sites:
            files.places[tensor.name] = index, start
            start += matrices * nbytes
    return parts


def is_in_order(source: SourceTensor) -> bool:
    """Whether its columns are in the checkpoint's order, as Gram matrices are."""
    return source.columns is None and (source.cut is None or source.cut.only_transposed)


def beside(site: Site, device: Device | None, threads: int) -> bool:
    """Whether threads have an input each. Else they share one: a device would have to hold Gram
    matrix and factor of each, but for experts, which are many and small."""
    if device is None:
        return True
    each = 2 * 4 * site.in_features**2
    return site.expert is not None and threads * each <= device.sums_bytes // 2


def cost_by(parts: Mapping[str, Sequence[Part]]) -> Any:
    """Of a site; the largest first, so that threads end together."""

    def cost(site: Site) -> int:
        rows = sum(matrices_of(part.tensor)[1] for part in parts[site.id])
        return -(site.in_features**3) - rows * site.in_features**2

    return cost


def sizes(tensor: PlannedTensor) -> tuple[int, int]:
    """Matrices of a tensor, and bytes of the blocks of each."""
    matrices, rows = matrices_of(tensor)
    return matrices, rows * tensor.type.row_bytes(tensor.source.in_features)
