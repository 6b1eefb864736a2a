"""Settings that are right one by one and wrong together."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import msgspec

from hostweights.messages.config import Config, Mode, PackingPolicy, Representation
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.journal import JournalPolicy
from hostweights.settings.catalog import refused


@dataclass(frozen=True, slots=True)
class _Rule:
    """Two names, when they are wrong together, and the way out.

    ``if_set``: wrong only if somebody set this one; a default that does not apply is no mistake.
    """

    first: str
    second: str
    wrong: Callable[[Config], bool]
    way_out: str
    if_set: str | None = None


def _larger(first: int | None, second: int | None) -> bool:
    return first is not None and second is not None and first > second


def _journal(config: Config) -> JournalPolicy:
    journal = config.runtime.journal
    return journal if isinstance(journal, JournalPolicy) else JournalPolicy(path=journal)


def _journal_in_root(config: Config) -> bool:
    path = _journal(config).path
    root = os.path.realpath(config.root)
    return path is not None and os.path.commonpath((root, os.path.realpath(path))) == root


def _journal_is_nowhere(config: Config) -> bool:
    journal = _journal(config)
    return journal.redact_paths and journal.path is None and not journal.ring_records


def _nothing_to_publish(config: Config) -> bool:
    production = config.production
    return config.mode is Mode.REQUIRED and production.publish_after_load and not production.build_before_load


_RULES: Final = (
    _Rule(
        "capacity.max_artifact_bytes",
        "capacity.max_store_bytes",
        lambda config: _larger(config.capacity.max_artifact_bytes, config.capacity.max_store_bytes),
        "an artifact that the first allows would never fit into the store: lower the first or raise the second",
    ),
    _Rule(
        "capacity.max_condemned_bytes",
        "capacity.max_store_bytes",
        lambda config: _larger(config.capacity.max_condemned_bytes, config.capacity.max_store_bytes),
        "condemned generations could fill the whole store: lower the first or raise the second",
    ),
    _Rule(
        "runtime.journal.path",
        "root",
        _journal_in_root,
        "the store keeps nothing but its own files: put the journal outside the root",
    ),
    _Rule(
        "runtime.journal.rotate_bytes",
        "runtime.journal.path",
        lambda config: _journal(config).rotate_bytes is not None and _journal(config).path is None,
        "there is no file to rotate: set the path, or leave the first out (the ring keeps a number of records)",
    ),
    _Rule(
        "runtime.journal.keep_parts",
        "runtime.journal.rotate_bytes",
        lambda config: _journal(config).keep_parts is not None and _journal(config).rotate_bytes is None,
        "a journal that never rotates has one part: set the second, or leave the first out",
    ),
    _Rule(
        "runtime.journal.redact_paths",
        "runtime.journal.path",
        _journal_is_nowhere,
        "nothing is written down: set the path or runtime.journal.ring_records, or leave the first out",
    ),
    _Rule(
        "mode",
        "production.publish_after_load",
        _nothing_to_publish,
        "mode required never loads canonically, so there is nothing to publish after a load: set "
        "production.build_before_load, or mode preferred",
        if_set="production.publish_after_load",
    ),
    _Rule(
        "production.packing",
        "representation",
        lambda config: (
            config.production.packing is PackingPolicy.ON and config.representation is not Representation.FINAL
        ),
        "packing is for bf16 weights, and FP8 leaves none in the blocks: set the first to auto or off, or the second "
        "to final",
    ),
    _Rule(
        "production.adopt",
        "production.publish_after_load",
        lambda config: config.production.adopt and not config.production.publish_after_load,
        "nothing is published after a load, so nothing is adopted then: set the second, or leave the first out and "
        "call HostWeights.adopt",
        if_set="production.adopt",
    ),
)


def refuse_wrong_combinations(config: Config, names_set: Collection[str] = ()) -> None:
    """Refuse settings that cannot hold together; ``names_set`` are the names that somebody set.

    Mode disabled goes with everything: it is the switch that must work in a hurry, whatever else is configured. Raises
    HostWeightsError(invalid_config) that names both settings, their values and the way out.
    """
    if config.mode is Mode.DISABLED:
        return
    for rule in _RULES:
        if (rule.if_set is None or rule.if_set in names_set) and rule.wrong(config):
            raise _refusal(config, rule)


def _refusal(config: Config, rule: _Rule) -> HostWeightsError:
    values = " and ".join(f"{name} = {_value(config, name)}" for name in (rule.first, rule.second))
    return refused(f"{values} do not go together: {rule.way_out}", first=rule.first, second=rule.second)


def _value(config: Config, name: str) -> object:
    runtime = msgspec.structs.replace(config.runtime, journal=_journal(config))
    found: object = msgspec.to_builtins(msgspec.structs.replace(config, runtime=runtime))
    for part in name.split("."):
        assert isinstance(found, dict)
        found = found[part]
    return found
