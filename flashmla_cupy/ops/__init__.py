"""The operations. Each module: check the arguments, select a kernel, plan its launch, launch."""
