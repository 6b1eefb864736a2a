"""An async serving engine: worker processes behind one port share one copy of the weights.

``app.py`` is the engine, ``worker.py`` one process, ``__main__.py`` the processes together, ``load.py`` the load test,
``soak.py`` the soak.
"""
