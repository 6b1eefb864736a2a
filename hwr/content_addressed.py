"""Publication by content, for loaders that nobody modelled: equal final tensors are one artifact, whatever made them.

The producer runs twice: once to name the artifact, once to write it, and only if nobody published it before.
"""

from typing import Final

import msgspec
from blake3 import blake3

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.identity import (
    ArtifactIdentity,
    ComponentIdentity,
    LayoutIdentity,
    ProducerIdentity,
    RepresentationIdentity,
    SourceIdentity,
)
from ..messages.manifest import MANIFEST_SCHEMA, Manifest
from .contract import Producer, ProductionPlan
from .layout import lay_out
from .writer import content_of

PRODUCER_NAME: Final = "content"
PRODUCER_VERSION: Final = 1
_RESTORER_SCHEMA: Final = 1
_MIXED_DTYPE: Final = "mixed"


def content_identity(producer: Producer, component: str, budget: Budget) -> ArtifactIdentity:
    """The identity of what a producer yields now: names, kinds, roles, shapes, dtypes, blocks, aliases and every byte.

    ``component`` names the part of the model for people and is part of the identity. Reads all tensors, writes nothing.
    Raises what ``contract.Writer.write`` raises for a wrong, missing or extra tensor.
    """
    layout = lay_out(producer.plan)
    content = content_of(layout, producer.produce(budget), budget)
    dtypes = {spec.dtype for spec in producer.plan.tensors}
    return ArtifactIdentity(
        source=SourceIdentity(model=PRODUCER_NAME, content=content),
        component=ComponentIdentity(name=component, ownership=_ownership(producer.plan)),
        representation=RepresentationIdentity(
            name=PRODUCER_NAME, dtype=dtypes.pop().value if len(dtypes) == 1 else _MIXED_DTYPE
        ),
        layout=LayoutIdentity(name=PRODUCER_NAME),
        producer=ProducerIdentity(name=PRODUCER_NAME, version=PRODUCER_VERSION, implementation=PRODUCER_NAME),
        manifest_schema=MANIFEST_SCHEMA,
        restorer_schema=_RESTORER_SCHEMA,
    )


def check_content(manifest: Manifest) -> None:
    """Refuse a manifest that is named by its content and holds another one: HostWeightsError(producer_failed)."""
    identity = manifest.identity
    if identity.producer.name == PRODUCER_NAME and identity.source.content != manifest.content:
        raise _changed(identity.source.content, manifest.content)


def _changed(named: str, found: str) -> HostWeightsError:
    return error(
        Stage.PRODUCTION,
        Code.PRODUCER_FAILED,
        f"the tensors changed between naming and writing: the content was {named}, it is {found}; publish what is at "
        "rest",
    )


def _ownership(plan: ProductionPlan) -> str:
    """What is owned and how it stands in blocks, in the plan's order: two orders are two layouts."""
    rows = [(s.name, s.kind.value, s.role, s.shape, s.dtype.value, s.block) for s in plan.tensors]
    parts = (rows, plan.blocks, sorted(plan.aliases))
    return blake3(msgspec.json.encode((*parts, plan.composites) if plan.composites else parts)).hexdigest()
