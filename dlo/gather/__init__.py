"""AllGather: ranks that hold equal weights bring a part of each block and gather the parts on the device."""
