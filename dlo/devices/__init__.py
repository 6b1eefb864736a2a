"""Devices behind the port of ``dlo.contract``. Importing this touches no GPU and no driver."""
