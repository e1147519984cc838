"""Runs Triton kernels without a GPU: interpreted, or compiled for a GPU that is not there.

Both in one process and whatever was imported before: the interpreter is put in place of a kernel
for one test. TRITON_INTERPRET=1 would interpret every kernel of the process for good.
"""

import os

# Before anything imports triton.
os.environ.pop("TRITON_INTERPRET", None)

import pytest  # noqa: E402

triton = pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)


@pytest.fixture
def interpreted(monkeypatch):
    """Let the kernels run on CPU tensors."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    from loco_compile.kernels import compress, decompress_mean, device

    def interpret_callee(function):
        # InterpretedFunction itself, when a kernel calls it, patches triton.language for good.
        rewritten = interpreter.InterpretedFunction(function).rewrite()

        def call(*args, **kwargs):
            patches = interpreter._patch_lang(function)
            try:
                return rewritten(*args, **kwargs)
            finally:
                patches.restore()

        return call

    monkeypatch.setattr(triton.language, "max", interpret_callee(triton.language.max.fn))
    for module in (compress, decompress_mean, device):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                is_launched = name.endswith("_kernel")
                make = interpreter.InterpretedFunction if is_launched else interpret_callee
                monkeypatch.setattr(module, name, make(value.fn))


@pytest.fixture
def sm90_target(monkeypatch):
    """Give Triton the name of a GPU: torch reads from it which arguments a kernel writes."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    before = driver._active
    driver.set_active(Driver())
    yield
    driver._active = before
