"""How the ranks of a job divide the work, as one checked value: sizes of the dimensions, and where each rank stands.

Ranks are numbered with tensor parallel innermost, then sequence, CFG, data and pipeline parallel: neighbours in rank
are neighbours in the dimension that talks most.
"""

from typing import Annotated

from msgspec import Meta

from .base import Count, Record
from .failure import Code, HostWeightsError, Stage, error

Size = Annotated[int, Meta(ge=1, le=1 << 20)]


class Place(Record, frozen=True, kw_only=True):
    """Where one rank stands: its coordinate in each dimension, from 0."""

    pp: Count
    dp: Count
    cfg: Count
    sp: Count
    tp: Count


class Topology(Record, frozen=True, kw_only=True):
    """Sizes of all dimensions; made by ``plan_topology``, which checks them.

    ``world = pp * dp * tp * sp * cfg``. ``sp`` is ``ulysses * ring``, or ``sp_allgather``. ``ep`` spreads experts over
    the ranks of one pipeline stage and multiplies nothing. HSDP's ``hsdp_shard * hsdp_replicate`` is the world again.
    """

    world: Size
    pp: Size = 1
    dp: Size = 1
    tp: Size = 1
    ulysses: Size = 1
    ring: Size = 1
    sp_allgather: Size = 1
    cfg: Size = 1
    ep: Size = 1
    hsdp_shard: Size = 1
    hsdp_replicate: Size = 1

    @property
    def sp(self) -> int:
        """Sequence parallel ranks, of either kind."""
        return self.ulysses * self.ring * self.sp_allgather

    @property
    def hsdp(self) -> bool:
        """Whether parameters are hybrid-sharded."""
        return self.hsdp_shard * self.hsdp_replicate > 1

    def place(self, rank: int) -> Place:
        """The coordinates of ``rank``; raises HostWeightsError(invalid_config) for one outside the world."""
        if not 0 <= rank < self.world:
            raise _refused(f"rank is {rank} and world is {self.world}: ranks run from 0 to {self.world - 1}")
        if self.hsdp and self.sp * self.cfg == 1:
            return Place(pp=0, dp=0, cfg=0, sp=0, tp=0)
        rest, tp = divmod(rank, self.tp)
        rest, sp = divmod(rest, self.sp)
        rest, cfg = divmod(rest, self.cfg)
        pp, dp = divmod(rest, self.dp)
        return Place(pp=pp, dp=dp, cfg=cfg, sp=sp, tp=tp)

    def weight_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks, in order, that share out each block with ``rank`` under AllGather; only ``rank`` if none does.

        Those that differ from it in data parallel alone; without data parallel, in sequence parallel alone. Never in
        tensor parallel, whose ranks hold other bytes. Refuses HSDP, whose parameters are shards already.
        """
        if self.hsdp:
            raise _both(
                "AllGather", "on", "hsdp_shard", self.hsdp_shard, "hybrid-sharded parameters are shards already"
            )
        self.place(rank)
        step = self.tp * self.sp * self.cfg if self.dp > 1 else self.tp
        size = self.dp if self.dp > 1 else self.sp
        first = rank - rank // step % size * step
        return tuple(first + index * step for index in range(size))


def plan_topology(
    world: int,
    *,
    pp: int = 1,
    dp: int | None = None,
    tp: int = 1,
    ulysses: int = 1,
    ring: int = 1,
    sp_allgather: int = 1,
    cfg: int = 1,
    ep: int = 1,
    hsdp_shard: int = 1,
    hsdp_replicate: int = 1,
) -> Topology:
    """Check the sizes; an omitted ``dp`` is what the world leaves over.

    Raises HostWeightsError(invalid_config) that names both settings that do not go together.
    """
    sizes: dict[str, int] = {
        "world": world,
        "pp": pp,
        "dp": 1 if dp is None else dp,
        "tp": tp,
        "ulysses": ulysses,
        "ring": ring,
        "sp_allgather": sp_allgather,
        "cfg": cfg,
        "ep": ep,
        "hsdp_shard": hsdp_shard,
        "hsdp_replicate": hsdp_replicate,
    }
    for name, size in sizes.items():
        if type(size) is not int or size < 1:  # from an untyped caller
            raise _refused(f"{name} is {size!r}; a size is a whole number, at least 1")
    for name in ("ulysses", "ring"):
        if sp_allgather > 1 and sizes[name] > 1:
            raise _both("sp_allgather", sp_allgather, name, sizes[name], "they are two ways to split a sequence")
    if hsdp_shard * hsdp_replicate > 1:
        _check_hsdp(sizes)
    else:
        sizes["dp"] = _data_parallel(sizes, dp)
    stage = world // pp
    if stage % ep:
        raise _both("ep", ep, "world", world, f"experts are spread over the {stage} ranks of a pipeline stage evenly")
    return Topology(**sizes)


def _check_hsdp(sizes: dict[str, int]) -> None:
    for name in ("tp", "dp", "pp", "ep"):
        if sizes[name] > 1:
            which = "hsdp_shard" if sizes["hsdp_shard"] > 1 else "hsdp_replicate"
            raise _both(which, sizes[which], name, sizes[name], "hybrid sharding replaces it")
    product = sizes["hsdp_shard"] * sizes["hsdp_replicate"]
    if product != sizes["world"]:
        why = f"hsdp_replicate is {sizes['hsdp_replicate']} and hsdp_shard * hsdp_replicate must be the world"
        raise _both("hsdp_shard", sizes["hsdp_shard"], "world", sizes["world"], why)
    rest = {name: sizes[name] for name in ("ulysses", "ring", "sp_allgather", "cfg") if sizes[name] > 1}
    inner = sizes["ulysses"] * sizes["ring"] * sizes["sp_allgather"] * sizes["cfg"]
    if rest and inner != sizes["world"]:
        name = next(iter(rest))
        why = f"with hybrid sharding all ranks are sequence or CFG parallel, and sp * cfg is {inner}"
        raise _both(name, rest[name], "world", sizes["world"], why)


def _data_parallel(sizes: dict[str, int], dp: int | None) -> int:
    names = ("pp", "tp", "ulysses", "ring", "sp_allgather", "cfg")
    others = 1
    for name in names:
        others *= sizes[name]
    world = sizes["world"]
    said = ", ".join(f"{name} {sizes[name]}" for name in names if sizes[name] > 1) or "no other dimension"
    if world % others:
        name = next(name for name in names if sizes[name] > 1)
        raise _both(name, sizes[name], "world", world, f"{others} ranks ({said}) do not divide the world")
    if dp is not None and dp * others != world:
        raise _both("dp", dp, "world", world, f"with {said} the world leaves dp {world // others}; omit dp to infer it")
    return world // others


def _both(name: str, value: object, other: str, other_value: object, why: str) -> HostWeightsError:
    return _refused(f"{name} {value} does not go with {other} {other_value}: {why}")


def _refused(text: str) -> HostWeightsError:
    return error(Stage.CONFIGURATION, Code.INVALID_CONFIG, f"topology: {text}")
