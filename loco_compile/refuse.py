"""Refuse FSDP groups that use what we would not reproduce, by the name of the feature."""

from __future__ import annotations

from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def refuse_traced(group: FSDPParamGroup) -> None:
    """Raise NotImplementedError for FSDP2 features that the captured graph would not reproduce."""
    mesh = group.mesh_info
    features = {
        "CPUOffloadPolicy": any(p.offload_to_cpu for p in group.fsdp_params),
        "dp_mesh_dims (SPMD DTensors)": getattr(mesh, "is_spmd_mesh", False),
        "a replicate-only mesh": not isinstance(mesh, FSDPMeshInfo),
        "fsdp_pre_all_gather tensor extensions": any(_has_extension(p) for p in group.fsdp_params),
        "an all-reduce hook": group._all_reduce_hook is not None,
        "a custom all-gather": type(group._all_gather_comm).__name__ != "DefaultAllGather",
        "eager.compress, which is for modules that are not compiled": is_served_eagerly(group),
        "a custom reduce-scatter": _has_custom_reduce_scatter(group),
        "set_reduce_scatter_unused_params": getattr(group, "reduce_scatter_unused_params", False),
    }
    for feature, is_used in features.items():
        if is_used:
            raise NotImplementedError(
                f"loco_compile cannot trace {group._module_fqn or 'the root module'}: it uses "
                f"{feature}. Remove it, or compile this model with another backend."
            )


def refuse_eager(group: FSDPParamGroup) -> None:
    """Raise NotImplementedError for a group that `eager.compress` cannot serve."""
    reasons = {
        "it has replicas (HSDP): its all-reduce is not FSDP2's reduce-scatter": isinstance(
            group.mesh_info, DDPMeshInfo
        ),
        "it has a custom reduce-scatter": _has_custom_reduce_scatter(group),
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotImplementedError(
                f"eager.compress cannot serve {group._module_fqn or 'this module'}: {reason}. "
                "Compile the module with the loco backend instead, or leave it uncompressed."
            )


def is_served_eagerly(group: FSDPParamGroup) -> bool:
    """Return whether `eager.compress` was called on a group."""
    return getattr(group._reduce_scatter_comm, "is_loco", False)


def _has_custom_reduce_scatter(group: FSDPParamGroup) -> bool:
    return type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter"


def _has_extension(fsdp_param: FSDPParam) -> bool:
    return hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather")
