"""From a flow to kernels, in one straight list of steps; see :mod:`flowlib.compiler.pipeline`."""
