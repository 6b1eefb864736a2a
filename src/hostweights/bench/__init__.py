"""``hostweights bench``: a model on this machine, from its publication to a streamed forward, and the report."""
