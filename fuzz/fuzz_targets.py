"""All targets, by name."""

import fuzz_checkpoints
import fuzz_messages
import fuzz_packed
import fuzz_settings
import fuzz_store
import fuzz_system

_MODULES = (fuzz_checkpoints, fuzz_store, fuzz_messages, fuzz_settings, fuzz_system, fuzz_packed)
TARGETS = {target.name: target for module in _MODULES for target in module.TARGETS}
