"""bf16 tensors packed without loss: choosing the form, packing while publishing, unpacking on the CPU."""
