"""Say what happens to every gradient: one row for each parameter, or why it is not compressed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from torch import nn

from .backend import CompileRecord
from .kernels.layout import message_bytes
from .passes.plan import Decline
from .state import GroupState, ParameterState, find_groups, group_state


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One FSDP group's compressed part, or one of its parts that stays uncompressed."""

    name: str
    """FSDP group, and the part of it in parentheses."""
    parameters: tuple[str, ...]
    """Fully qualified names."""
    numel: int
    """Elements of the full parameters."""
    dtype: str
    """Dtype in which the gradient is reduced."""
    collective: str
    """"reduce-scatter", or "all-reduce" between the replicas of an HSDP group."""
    way: str
    """"compiled", or "eager" for a group that FSDP2's own hooks reduce."""
    method: str
    """"loco", or "none" for an uncompressed reduce-scatter."""
    bytes_before: int
    """Bytes that one rank sends in one step without compression, in `dtype`: W - 1 chunks of a
    reduce-scatter, 2 (R - 1) of an all-reduce."""
    bytes_on_wire: int
    """Bytes that one rank sends in one step."""
    error_bytes: int
    """Bytes of error state on this rank."""
    reason: str
    """Why the part is not compressed; empty if it is."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What `explain` found."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        columns = [f.name for f in dataclasses.fields(Row) if f.name != "parameters"]
        table = [[c.replace("_", " ") for c in columns]]
        table += [[_text(getattr(row, c)) for c in columns] for row in self.rows]
        widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
        lines = ["  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)) for line in table]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], self._total()])

    def _total(self) -> str:
        before = sum(r.bytes_before for r in self.rows)
        after = sum(r.bytes_on_wire for r in self.rows)
        ratio = f" ({after / before:.3f} of it)" if before else ""
        return (
            f"sent by one rank in one step: {before:,} bytes before, {after:,} on the wire{ratio}"
        )

    def to_json(self) -> str:
        """Return the rows as JSON."""
        return json.dumps([dataclasses.asdict(r) for r in self.rows], indent=2)


_SENDS_NOTHING = (Decline.FROZEN, Decline.ONE_RANK, Decline.UNUSED, Decline.HELD)


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def explain(model: nn.Module) -> Report:
    """Return what the compiled step does with every gradient of `model`, after its first step.

    Raises: ValueError if the model has no FSDP2 module, or none of it has been compiled by us.
    """
    rows: list[Row] = []
    groups = find_groups(model)
    if all(group_state(g) is None for g in groups):
        raise ValueError(
            "explain(model) needs a model that has run a step under the loco backend: call it "
            "after the first backward of torch.compile(model, backend=loco_backend)"
        )
    for group, name in groups.items():
        rows += _rows(name, group_state(group))
    return Report(rows=tuple(rows))


def _rows(name: str, state: GroupState | None) -> list[Row]:
    """Join the parameters of a group that share a fate."""
    if state is None:
        return []
    fates: dict[Decline | None, list[ParameterState]] = {}
    for index, parameter in enumerate(state.parameters):
        fates.setdefault(_fate(state, parameter, index), []).append(parameter)
    rows = [_row(name, state, fate, members) for fate, members in fates.items()]
    inside = [p for p in state.parameters if p.num_replicas() > 1 and p.requires_grad]
    if sum(p.bytes_inside_replica() for p in inside):
        rows.append(_row_inside_replica(name, state, inside))
    return rows


def _row_inside_replica(name: str, state: GroupState, members: list[ParameterState]) -> Row:
    """Return the row of an HSDP group's reduce-scatter, which comes before its all-reduce."""
    num_bytes = sum(m.bytes_inside_replica() for m in members)
    return Row(
        name=name or "(root)",
        parameters=tuple(state.name_in(name, m) for m in members),
        numel=sum(m.numel() for m in members),
        dtype=members[0].grad_dtype().removeprefix("torch."),
        collective="reduce-scatter",
        way="eager" if state.record is None else "compiled",
        method="none",
        bytes_before=num_bytes,
        bytes_on_wire=num_bytes,
        error_bytes=0,
        reason=Decline.INSIDE_REPLICA.value,
    )


def _fate(state: GroupState, parameter: ParameterState, index: int) -> Decline | None:
    if state.eager:
        return parameter.decline or (None if parameter.is_compressed_now() else Decline.START)
    record: CompileRecord | None = state.record
    if record is None:
        return Decline.NOT_COMPILED
    if parameter.decline in (Decline.FROZEN, Decline.ONE_RANK):
        return parameter.decline
    missing = Decline.HELD if state.holds else Decline.UNUSED
    return record.decisions.get(state.name_in_graph, {}).get(index, missing)


def _row(name: str, state: GroupState, fate: Decline | None, members: list[ParameterState]) -> Row:
    layouts = [m.layout for m in members if fate is None and m.layout is not None]
    before = sum(m.plain_bytes() for m in members)
    sends_nothing = fate in _SENDS_NOTHING
    compressed = message_bytes(layouts) * (layouts[0].num_ranks - 1) if layouts else 0
    compressed += sum(m.gathered_bytes() for m in members)
    return Row(
        name=name or "(root)",
        parameters=tuple(state.name_in(name, m) for m in members),
        numel=sum(m.numel() for m in members),
        dtype=members[0].grad_dtype().removeprefix("torch."),
        collective="all-reduce" if members[0].num_replicas() > 1 else "reduce-scatter",
        way="eager" if state.eager or state.record is None else "compiled",
        method=state.config.method if fate is None else "none",
        bytes_before=0 if sends_nothing else before,
        bytes_on_wire=compressed if fate is None else (0 if sends_nothing else before),
        error_bytes=sum(m.error_bytes() for m in members),
        reason=fate.value if fate else "",
    )
