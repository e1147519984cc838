"""Decide which sites travel together. Pure: no graph is edited."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .find import Gather, Site


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bucket:
    """Sites that share one message, in the order of their group's parameters."""

    name: str
    """Name of the FSDP group, or of the one site that travels alone."""
    sites: tuple[Site, ...]

    @property
    def last(self) -> Site:
        """The site whose reduce-scatter comes last in the graph: all gradients exist there."""
        return max(self.sites, key=lambda s: s.collective)

    @property
    def kind(self) -> str:
        """Kind of its collectives."""
        return self.sites[0].kind

    @property
    def num_ranks(self) -> int:
        """W."""
        return self.sites[0].num_ranks

    @property
    def group_name(self) -> str:
        """Process group of the exchange."""
        return self.sites[0].group_name

    @property
    def op(self) -> str:
        """Reduction of the exchange."""
        return self.sites[0].op


def bucket_sites(sites: Sequence[Site]) -> list[Bucket]:
    """Group sites by FSDP group, kind, process group, reduction and dtype.

    A site without a tag travels alone. A parameter that occurs twice (a module called twice) opens
    a second bucket: its second exchange must see the error that the first one left.
    """
    buckets: dict[tuple[str, str, str, str, torch.dtype, int], list[Site]] = {}
    seen: dict[tuple[str, str, str], int] = {}
    for site in sites:
        name, turn = site.name, 0
        if site.tag is not None:
            name = site.tag.bucket
            turn = seen.get((name, site.kind, site.tag.name), 0)
            seen[name, site.kind, site.tag.name] = turn + 1
        key = (name, site.kind, site.group_name, site.op, site.val.dtype, turn)
        buckets.setdefault(key, []).append(site)
    return [
        Bucket(name=key[0], sites=tuple(sorted(members, key=lambda s: s.tag.index if s.tag else 0)))
        for key, members in buckets.items()
    ]


def bucket_gathers(gathers: Sequence[Gather]) -> list[list[Gather]]:
    """Group gathers by FSDP group, process group and dtype, in the order of the parameters."""
    buckets: dict[tuple[str, str, torch.dtype, int], list[Gather]] = {}
    seen: dict[tuple[str, str], int] = {}
    for gather in {g.gather: g for g in gathers}.values():  # each once, whoever shares it
        turn = seen.get((gather.tag.bucket, gather.tag.name), 0)
        seen[gather.tag.bucket, gather.tag.name] = turn + 1
        dtype = gather.shard.meta["val"].dtype
        key = (gather.tag.bucket, gather.group_name, dtype, turn)
        buckets.setdefault(key, []).append(gather)
    return [sorted(members, key=lambda g: g.tag.index) for members in buckets.values()]
