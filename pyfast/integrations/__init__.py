"""pyfast's kernels inside other libraries, by those libraries' own ways of registering: nothing is patched."""
