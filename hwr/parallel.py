"""Which parallel coordinates of a worker name an artifact: those that change bytes, and no other.

- data parallel: never; all replicas of a host share one artifact.
- tensor parallel: size and rank; peers along other dimensions share.
- sequence parallel: size and backend, only where they change bytes; never the rank.
- pipeline parallel: the stage, which owns other tensors.
- expert parallel: size and rank, which own other experts.
- CFG parallel and hybrid sharding: refused; who owns which bytes is not defined for final layouts.
"""

from dataclasses import dataclass

from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.identity import LayoutIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlace:
    """Where a worker stands, as its launcher counts: sizes from 1, ranks from 0.

    ``sp_changes_bytes`` says that this sequence-parallel backend stores other bytes than a single worker.
    """

    dp_size: int = 1
    dp_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    sp_size: int = 1
    sp_rank: int = 0
    sp_backend: str = ""
    sp_changes_bytes: bool = False
    pp_size: int = 1
    pp_stage: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    cfg_size: int = 1
    hsdp_size: int = 1


def layout_identity(name: str, place: ParallelPlace) -> LayoutIdentity:
    """The layout's part of an identity for a worker at ``place``.

    Raises HostWeightsError(invalid_config) naming a rank outside its size, and (unsupported) for a dimension whose
    ownership of bytes is not defined.
    """
    for what, rank, size in (
        ("dp_rank", place.dp_rank, place.dp_size),
        ("tp_rank", place.tp_rank, place.tp_size),
        ("sp_rank", place.sp_rank, place.sp_size),
        ("pp_stage", place.pp_stage, place.pp_size),
        ("ep_rank", place.ep_rank, place.ep_size),
    ):
        if not 0 <= rank < size:
            raise _refused(Code.INVALID_CONFIG, what, f"is {rank}, its dimension has the size {size}")
    for what, size in (("cfg_size", place.cfg_size), ("hsdp_size", place.hsdp_size)):
        if size != 1:
            raise _refused(Code.UNSUPPORTED, what, f"is {size}; which bytes its ranks own is not defined, use 1")
    in_bytes = place.sp_changes_bytes and place.sp_size > 1
    if in_bytes and not place.sp_backend:
        raise _refused(Code.INVALID_CONFIG, "sp_backend", "is empty; name the backend that changes the bytes")
    return LayoutIdentity(
        name=name,
        tp_size=place.tp_size,
        tp_rank=place.tp_rank,
        sp_size=place.sp_size if in_bytes else 1,
        sp_backend=place.sp_backend if in_bytes else "",
        pp_size=place.pp_size,
        pp_stage=place.pp_stage,
        ep_size=place.ep_size,
        ep_rank=place.ep_rank,
    )


def _refused(code: Code, what: str, problem: str) -> HostWeightsError:
    return error(Stage.CONFIGURATION, code, f"parallel place: {what} {problem}", path=what)
