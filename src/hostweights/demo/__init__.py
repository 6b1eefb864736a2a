"""``hostweights demo``: real weights, a cold and a warm worker, streamed blocks, compared to the bit."""
