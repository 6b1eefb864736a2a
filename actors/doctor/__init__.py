"""Whether this machine can do what hostweights does: readings of it, and a verdict per feature with the mend.

``read_machine`` measures, ``judge`` decides; the second is pure.
"""

from .probes import read_machine
from .readings import GpuReading, Readings
from .verdicts import State, Verdict, judge

__all__ = ["GpuReading", "Readings", "State", "Verdict", "judge", "read_machine"]
