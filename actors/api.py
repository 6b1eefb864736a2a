"""The async public API: load, publish in the background, adopt, attach for streaming, look, close."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from uuid import uuid4

import torch

from ..hwr.records import ModelRecord
from ..hwr.source_memory import SourceMemory
from ..messages.base import Message
from ..messages.budget import Budget
from ..messages.config import Config, Mode, check_remote, checked_config, checked_mode
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.identity import ArtifactIdentity
from ..messages.publisher import Publish
from ..messages.report import PublicationReport, ResolutionReport
from ..messages.resolver import Resolve, Resolved
from ..messages.store import LeaseInfo, Leases, ListLeases, Memory, ReadMemory, Release
from ..messages.transport import (
    Attach,
    Attached,
    AttachmentInfo,
    Attachments,
    BackingChoice,
    Detach,
    Forget,
    Forgotten,
    ListAttachments,
    ReadRing,
    RegistrationPolicy,
    Ring,
    RingStats,
)
from .arguments import checked_group, checked_message, finite_timeout
from .assembly import PUBLISHER, RESOLVER, STORE, TRANSPORT, Assembly
from .attachment import Attachment
from .concessions import Concessions
from .finishing import to_the_end
from .kernel.blocking import in_own_thread
from .kernel.events import Subscription
from .kernel.instruments import Instruments
from .loads import Loads
from .publication import Publication
from .resources import ModelEntry
from .stats import AttachmentStats, HostStats

if TYPE_CHECKING:
    from ..hwr.adapters import Adapter
    from .groups import WeightGroup

_LOG = logging.getLogger("hostweights")
_TRIES = 3
"""To take an attach back on a host whose faults may pass: nobody else can."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class HostWeights:
    """One process's share of a node-local store; use it as ``async with HostWeights(config) as host:``.

    Lives on the running event loop and never owns it. Every method may be cancelled: what it began is then undone
    before the cancel goes on. Modules that were loaded stay usable after ``close`` (their pages stay mapped until the
    module is gone), but they no longer stream and no longer hold a lease.
    """

    def __init__(self, config: Config, *, instruments: Instruments | None = None) -> None:
        """``instruments`` count and trace every message of the four actors; without them that costs nothing.

        Raises HostWeightsError(invalid_config) for a setting that is not what its type says, and for a remote's URL
        that holds credentials or is none.
        """
        self._config = checked_config(config)
        self._assembly = Assembly(self._config, instruments)
        self._publications: dict[str, Publication] = {}
        self._loads = Loads()
        self._concessions = Concessions()
        self._unloading: set[str] = set()
        self._turn = asyncio.Lock()
        """Of whoever opens or closes."""

    @property
    def config(self) -> Config:
        """The configuration it was made with."""
        return self._config

    async def open(self) -> Self:
        """Start the actors. Touches no file of the store: the first load that needs it opens it.

        After an error or a cancel nothing runs. Opening what is open is refused and changes nothing. An open waits for
        another open or close that is under way.
        """
        async with self._turn:
            if self._assembly.running:
                raise error(
                    Stage.LIFECYCLE, Code.INVALID_CONFIG, "this HostWeights is open already; use it, or make another"
                )
            try:
                await self._assembly.start()
            except BaseException:
                with suppress(HostWeightsError):  # the caller is told why it did not open
                    await to_the_end(self._assembly.stop())
                raise
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def load(
        self,
        factory: Callable[[], torch.nn.Module],
        source: str | Path,
        *,
        record: ModelRecord | None = None,
        name: str | None = None,
        adapter: "Adapter | None" = None,
        mode: Mode | None = None,
        together: "WeightGroup | None" = None,
        timeout_s: float | None = None,
    ) -> "LoadedModel":
        """Bring a model's weights in, from a lease if the artifact exists, else as the mode says.

        ``factory`` builds the module; it may be called more than once, and its parameters are never initialised.
        ``source`` is a safetensors file or a checkpoint directory. ``record`` says how checkpoint and module fit; by
        default names must match and blocks are discovered. ``name`` is the model's name in the identity (default: the
        module's class). ``adapter`` is merged into the weights, which makes them another artifact. With ``together``
        all ranks of that group (tensor parallel ones, each with its own record's ``for_rank``, or any others) call
        this, and all bind their leases or none does; ``mode disabled`` takes no part. Such loads run one after another,
        in the order of the calls, which all ranks must make in the same: those that give another ``name`` are told so
        (group_mismatch). One that ends early has its place there, where the others are told that it binds nothing; the
        last one called may be called again before they come to it, and takes that place. Raises HostWeightsError with
        the terminal failure of the resolution.
        """
        policy = checked_group("together", together)
        model_id, lease_id = _new_id("model"), _new_id("lease")
        mode = self._config.mode if mode is None else checked_mode(mode)
        check_remote(self._config, mode)
        entry = ModelEntry(factory=factory, source=Path(source), name=name, record=record, adapter=adapter)
        if policy is not None and len(policy.ranks) > 1 and mode is not Mode.DISABLED:
            self._concessions.agree(entry, policy)
        self._assembly.resources.models.put(model_id, entry)
        request = Resolve(
            model_id=model_id,
            lease_id=lease_id,
            mode=mode,
            validation=self._config.validation,
            build_before_load=self._config.production.build_before_load,
            fetch=self._config.remote.url is not None,
            together=entry.agreement is not None,
        )
        try:
            resolved = await self._loads.run(self._resolve(entry, request, timeout_s), f"load {model_id}")
        except BaseException as ended:
            self._abandon(model_id, lease_id)
            if isinstance(ended, asyncio.CancelledError) and self._assembly.running:
                self._concessions.begin(entry)  # it may have ended before its first step
            self._concessions.leave(entry)
            raise
        if resolved.report.failure is not None:
            self._abandon(model_id, lease_id)
            raise HostWeightsError(resolved.report.failure)
        _warn(resolved.report)
        module = entry.need_prepared().module
        model = LoadedModel(self, model_id, module, resolved.report, resolved.identity, lease_id)
        if resolved.publishable and self._config.production.publish_after_load:
            self.publish(model)
        return model

    async def _resolve(self, entry: ModelEntry, request: Resolve, timeout_s: float | None) -> Resolved:
        began_s = time.monotonic()
        try:
            resolved = await self._ask(RESOLVER, request, Resolved, timeout_s)
        except (HostWeightsError, asyncio.CancelledError):
            if self._assembly.running:
                self._concessions.begin(entry)
            raise
        if resolved.report.failure is not None:
            limit_s = finite_timeout(timeout_s)
            left_s = None if limit_s is None else max(limit_s - (time.monotonic() - began_s), 0.0)
            await self._concessions.say(entry, left_s)
        return resolved

    async def _describe(self, find: Callable[[SourceMemory | None], T], mode: Mode | None) -> T:
        """What ``find`` makes of a source in a thread of its own, with what this store remembers of sources."""
        _ = self._assembly.system  # closed, nothing may open the store again
        remembers = (self._config.mode if mode is None else checked_mode(mode)) is not Mode.DISABLED

        def describe(budget: Budget) -> T:
            return find(self._assembly.source_memory(budget) if remembers else None)

        return await self._loads.run(in_own_thread("hostweights-directory", describe), "describe a directory")

    def _abandon(self, model_id: str, lease_id: str) -> None:
        self._assembly.resources.forget_model(model_id)
        self._tell(STORE, Release(lease_id=lease_id))

    def publish(self, model: "LoadedModel", *, adopt: bool | None = None) -> Publication:
        """Publish a loaded model in the background and, if asked, re-bind it to the published pages.

        Returns at once. A model whose artifact exists already joins it. Forwards go on meanwhile; adoption happens
        between two forwards and changes no bit of any output.
        """
        if model.identity is None:
            text = (
                f"model {model.model_id} was loaded with mode disabled and has no identity; load it with another mode"
            )
            raise error(Stage.PUBLICATION, Code.INVALID_CONFIG, text)
        self._refuse_unloading(model)
        request = Publish(
            publication_id=_new_id("publication"),
            lease_id=_new_id("lease"),
            model_id=model.model_id,
            identity=model.identity,
            validation=self._config.validation,
            adopt=self._config.production.adopt if adopt is None else adopt,
        )
        publication = Publication(self._ask(PUBLISHER, request, PublicationReport), request)
        model.publications.append(publication)
        self._publications[request.publication_id] = publication
        publication.on_end(self._publication_ended)
        return publication

    def _publication_ended(self, report: PublicationReport) -> None:
        self._publications.pop(report.publication_id, None)
        if report.failure is not None:
            _LOG.warning("%s: %s (the served model is as it was)", report.failure.stage, report.failure.text)

    async def adopt(self, model: "LoadedModel") -> PublicationReport:
        """Re-bind a model to its artifact, publishing it first if nobody has; free its private tensors.

        A cancel cancels the publication that it started, and goes on once nothing of that is left.
        """
        publication = self.publish(model, adopt=True)
        try:
            return await publication.wait()
        except asyncio.CancelledError:
            await to_the_end(publication.cancel())
            raise

    async def attach(
        self,
        model: "LoadedModel",
        *,
        device: str = "cpu",
        slots: int | None = 2,
        slot_limit_bytes: int | None = None,
        backing: BackingChoice = BackingChoice.AUTO,
        resident: int = 0,
        on_demand: Sequence[str] = (),
        registration: RegistrationPolicy = RegistrationPolicy(),  # noqa: B008  frozen
        gather: "WeightGroup | None" = None,
        timeout_s: float | None = None,
    ) -> "Attachment":
        """Stream the model's blocks through ``slots`` slots of ``device``; everything else becomes resident there.

        ``slots`` None begins with two and adds more if the first forwards show that this pays, as far as all slots fit
        ``slot_limit_bytes``; ``Attachment.stats().depth`` says what was decided and why. The first ``resident`` blocks
        stay on the device, until ``Attachment.release``. Parts at the paths of ``on_demand``, outside the blocks, are
        there only while their ``forward`` runs: for what is used now and then.

        ``registration`` bounds what is registered with the device's driver in the background; the cpu device registers
        nothing. With ``gather`` the ranks of that group, which must all attach the same model with the same ``slots``
        and call its blocks in the same order, bring each block together. Other weights are refused (group_mismatch),
        and so are the same ones from checkpoint files that are not copies of each other.

        From now on ``model.module(...)`` computes on the device. After an error or a cancel the model is as it was.
        """
        self._refuse_unloading(model)
        policy = checked_group("gather", gather)
        attachment_id = _new_id("attachment")
        request = checked_message(
            Attach(
                attachment_id=attachment_id,
                model_id=model.model_id,
                device=device,
                slots=slots,
                backing=backing,
                resident=resident,
                registration=registration,
                on_demand=tuple(on_demand),
                slot_limit_bytes=slot_limit_bytes,
                gather=policy,
            ),
            f"; backings are {', '.join(BackingChoice)}",
        )
        attach = self._ask(TRANSPORT, request, Attached, timeout_s)
        try:
            attached = await (attach if gather is None else self._loads.run(attach, f"attach {model.model_id}"))
        except (HostWeightsError, asyncio.CancelledError):
            await self._take_back(attachment_id)
            raise
        return Attachment(self._assembly, attached.info)

    async def _take_back(self, attachment_id: str) -> None:
        """Undo an attach that stands although its caller has no reply, or that could not be undone the first time.

        Nothing of the attach runs any more, so the table knows. A close beside it takes the attachment down itself.
        """
        detach = Detach(attachment_id=attachment_id, terminal=False)
        faults = 0
        while faults < _TRIES and self._assembly.resources.attachments.find(attachment_id) is not None:
            try:
                await to_the_end(self._assembly.insist(TRANSPORT, detach))
            except HostWeightsError as fault:  # the caller is told why it has no attachment
                faults += 1
                if faults == _TRIES:
                    _LOG.warning("%s streams until its model is unloaded: %s", attachment_id, fault.failure.text)

    async def unload(self, model: "LoadedModel") -> None:
        """Cancel the model's publications, stop its streaming, give its leases back and forget it.

        Idempotent; never torn by a cancel; after an error, call it again. Attach and publish are refused from its start
        on (model_unknown). The module stays usable by its user.
        """
        await to_the_end(self._unload(model))

    async def _unload(self, model: "LoadedModel") -> None:
        self._unloading.add(model.model_id)
        for publication in model.publications:
            await publication.cancel()
        forgotten = await self._assembly.insist(TRANSPORT, Forget(model_id=model.model_id))
        assert isinstance(forgotten, Forgotten)
        # The lease of the load too: an adoption that was cancelled after it re-bound the model could not release it.
        lease_ids = [model.lease_id, *(publication.lease_id for publication in model.publications)]
        if forgotten.lease_id is not None:
            lease_ids.append(forgotten.lease_id)
        for lease_id in dict.fromkeys(lease_ids):
            await self._assembly.insist(STORE, Release(lease_id=lease_id))
        self._unloading.discard(model.model_id)

    def _refuse_unloading(self, model: "LoadedModel") -> None:
        """What came between the steps of an unload would keep what that gives back."""
        if model.model_id in self._unloading:
            text = f"model {model.model_id} is being unloaded; load it again to use it"
            raise error(Stage.LIFECYCLE, Code.MODEL_UNKNOWN, text)

    async def leases(self) -> tuple[LeaseInfo, ...]:
        """The live leases of this process."""
        return (await self._ask(STORE, ListLeases(), Leases)).leases

    async def attachments(self) -> tuple[AttachmentInfo, ...]:
        """The models that stream now."""
        return (await self._ask(TRANSPORT, ListAttachments(), Attachments)).attachments

    async def stats(self) -> HostStats:
        """A snapshot of counters; cheap enough to ask for every second."""
        attachments: list[AttachmentStats] = []
        for info in await self.attachments():
            try:
                attachments.append(AttachmentStats(info=info, ring=await self._ring(info.attachment_id)))
            except HostWeightsError as gone:
                if gone.code is not Code.NOT_ATTACHED:  # detached meanwhile
                    raise
        return HostStats(
            leases=await self.leases(),
            attachments=tuple(attachments),
            publications=tuple(self._publications),
            runtime=self._assembly.system.stats(),
        )

    async def _ring(self, attachment_id: str) -> RingStats:
        return (await self._ask(TRANSPORT, ReadRing(attachment_id=attachment_id), Ring)).stats

    async def memory(self) -> Memory:
        """What this process and its leases cost now; reads the kernel's accounting, some milliseconds."""
        return await self._ask(STORE, ReadMemory(), Memory)

    async def flush_journal(self) -> None:
        """Return when everything recorded so far is in the journal's file; a process that is killed then loses none."""
        await self._assembly.system.flush_journal()

    def recent_journal(self) -> bytes:
        """The newest records, from memory, as the bytes of a journal file for ``hostweights replay``.

        Empty unless ``Config.runtime.journal`` keeps a ring.
        """
        return self._assembly.system.recent_journal()

    def events(self) -> Subscription:
        """Reports and progress from now on, as an async iterator; close it, or use it as a context manager."""
        return self._assembly.system.subscribe()

    async def close(self) -> None:
        """Cancel loads, publications and attaches that meet other ranks, stop streaming, give leases back, end actors.

        Idempotent, also beside another close; one that comes while it opens waits for that, and closes it then. A
        cancel does not tear it: it goes on once everything is down.
        """
        await to_the_end(self._close())

    async def _close(self) -> None:
        async with self._turn:
            self._assembly.end()
            try:
                await self._loads.close()
                await self._concessions.close()
                for publication in list(self._publications.values()):
                    await publication.cancel()
                await self._assembly.stop()
            finally:
                self._loads.open()

    async def _ask(self, recipient: str, message: Message, reply: type[M], timeout_s: float | None = None) -> M:
        answer = await self._assembly.ask(recipient, message, timeout_s)
        assert isinstance(answer, reply), type(answer)
        return answer

    def _tell(self, recipient: str, message: Message) -> None:
        self._assembly.tell(recipient, message)


class LoadedModel:
    """A model whose weights are in. ``module`` is the user's; parameters do not require gradients.

    It stays loaded, with its lease, until ``unload`` or the host's ``close``. Losing this object unloads nothing: its
    module may be in use.
    """

    def __init__(
        self,
        host: HostWeights,
        model_id: str,
        module: torch.nn.Module,
        report: ResolutionReport,
        identity: ArtifactIdentity | None,
        lease_id: str,
    ) -> None:
        self._host = host
        self.lease_id = lease_id
        self.model_id = model_id
        self.module = module
        self.report = report
        self.identity = identity
        self.publications: list[Publication] = []

    @property
    def publication(self) -> Publication | None:
        """The first publication of this model: the one that ``load`` started, if it did."""
        return self.publications[0] if self.publications else None

    @property
    def warm(self) -> bool:
        """Whether the weights came from the store."""
        return self.report.outcome.value.startswith("local_")

    async def unload(self) -> None:
        """``HostWeights.unload`` of this model."""
        await self._host.unload(self)


def _warn(report: ResolutionReport) -> None:
    """A mode that could not apply says so loudly."""
    for attempt in report.attempts:
        if attempt.failure is not None:
            _LOG.warning("%s: %s (went on with %s)", attempt.stage, attempt.failure.text, attempt.action)


def _new_id(prefix: str) -> str:
    return f"{prefix}-{uuid4().hex}"
