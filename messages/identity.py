"""What names an artifact: every field that can change its bytes, and nothing else.

Never a device, a rank that shares bytes, a path or a process-specific value. The canonical form and the key are
made by ``hwr.identity``.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from .base import Count, Digest, Name, Record

IDENTITY_SCHEMA = 1


class AdaptationKind(StrEnum):
    """What was done to the base weights before publication."""

    BASE = "base"
    MERGED = "merged"


class SourceIdentity(Record, frozen=True, kw_only=True):
    """Where the weights come from: their content, never their path."""

    model: Name
    content: Digest


class ComponentIdentity(Record, frozen=True, kw_only=True):
    """Which part of the model, and exactly which tensors it owns."""

    name: Name
    ownership: Digest


class RepresentationIdentity(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How values are stored; ``codec`` and its version are given where tensors are packed.

    Fields from ``codec`` on came later: they are left out of every encoding while they have their default.
    """

    name: Name
    dtype: Name
    codec: Annotated[str, Meta(max_length=1024)] = ""
    codec_version: Count = 0


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


class LayoutIdentity(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How tensors are laid out; a parallel coordinate stands here only when it changes bytes.

    Made from a worker's place by ``hwr.parallel.layout_identity``. A sequence-parallel rank never changes bytes, so
    there is none; ``sp_backend`` is empty while ``sp_size`` is 1.

    Fields from ``sp_size`` on came later: they are left out of every encoding while they have their default, so that
    earlier readers understand it. Those with a factory are always written.
    """

    name: Name
    tp_size: Count = msgspec.field(default_factory=_one)
    tp_rank: Count = msgspec.field(default_factory=_zero)
    sp_size: Count = 1
    sp_backend: Annotated[str, Meta(max_length=1024)] = ""
    pp_size: Count = 1
    pp_stage: Count = 0
    ep_size: Count = 1
    ep_rank: Count = 0


class AdaptationIdentity(Record, frozen=True, kw_only=True):
    """Base weights, or a merged adapter with its fingerprint and merge rule."""

    kind: AdaptationKind = AdaptationKind.BASE
    fingerprint: Digest | None = None
    merge_rule: Name | None = None


class ProducerIdentity(Record, frozen=True, kw_only=True):
    """Who wrote the artifact; ``implementation`` changes whenever produced bytes could."""

    name: Name
    version: Count
    implementation: Name


class ArtifactIdentity(Record, frozen=True, kw_only=True):
    """The full name of an artifact; its key is the digest of its canonical form."""

    schema: Count = IDENTITY_SCHEMA
    source: SourceIdentity
    component: ComponentIdentity
    representation: RepresentationIdentity
    layout: LayoutIdentity
    adaptation: AdaptationIdentity = AdaptationIdentity()
    producer: ProducerIdentity
    manifest_schema: Count
    restorer_schema: Count
