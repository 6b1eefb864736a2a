"""The union of all messages, for whoever decodes one without knowing which it is."""

from . import publisher, report, resolver, store, transport
from .failure import Failure

AnyMessage = (
    Failure
    | report.ResolutionReport
    | report.PublicationReport
    | store.Lookup
    | store.Fetch
    | store.Build
    | store.Release
    | store.ListLeases
    | store.Leased
    | store.Missed
    | store.Released
    | store.Leases
    | store.ReadMemory
    | store.Memory
    | store.MeasureMemory
    | store.RecoverLeases
    | store.LookupArtifact
    | store.FetchArtifact
    | store.BuildArtifact
    | store.CloseLease
    | store.BuildProgress
    | resolver.Resolve
    | resolver.Resolved
    | resolver.Identify
    | resolver.Identified
    | resolver.PlanRestore
    | resolver.RestorePlanned
    | resolver.CommitRestore
    | resolver.Restored
    | resolver.LoadCanonical
    | resolver.CanonicalLoaded
    | resolver.StageFailed
    | publisher.Publish
    | publisher.ListPublications
    | publisher.Publications
    | publisher.RegisterProducer
    | publisher.ProducerRegistered
    | publisher.ForgetProducer
    | publisher.ProducerForgotten
    | transport.Attach
    | transport.Detach
    | transport.Forget
    | transport.Rebase
    | transport.AnnounceForwards
    | transport.ReleaseResident
    | transport.ReadRing
    | transport.ListAttachments
    | transport.Attachments
    | transport.ListModelAttachments
    | transport.Attached
    | transport.Detached
    | transport.Forgotten
    | transport.Rebased
    | transport.Announced
    | transport.ResidentReleased
    | transport.Ring
    | transport.AttachModel
    | transport.DetachModel
    | transport.ForgetModel
    | transport.RebaseModel
    | transport.AnnounceModel
    | transport.ReleaseModelResident
    | transport.ReadModelRing
)
"""Any message or effect of the four actors."""
