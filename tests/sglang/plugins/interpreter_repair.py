"""A plugin for tests: SGLang's Triton kernels run in flowlib's repaired interpreter, which rounds bfloat16 right."""

from flowlib.runtime import interpreter


def register():
    interpreter.install()
