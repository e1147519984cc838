"""The C++ that Inductor makes of the exchange: fewest bytes (I10), read off the code.

What is asserted was measured on torch 2.13 and 2.14. A change of Inductor that splits the loops
again, copies a gradient or buffers an error shows here before it shows in a profile.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from loco_compile import LoCoBackend, LoCoConfig
from tests.graphs import fake_group

pytestmark = pytest.mark.slow

NUM_RANKS, BLOCK = 2, 128
SHAPES = [(256, 128), (128, 256)]
NUMEL = 256 * 128
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16, reduced in float32": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}
every_policy = pytest.mark.parametrize("policy", POLICIES)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One generated kernel and the call of it."""

    types: tuple[str, ...]
    pointers: tuple[str, ...]
    arguments: tuple[str, ...]
    body: str

    def where(self, is_wanted: Callable[[str, str], bool]) -> list[int]:
        """Positions of the parameters with a wanted (type, argument)."""
        pairs = zip(self.types, self.arguments, strict=True)
        return [i for i, (t, a) in enumerate(pairs) if is_wanted(t, a)]

    @property
    def new_errors(self) -> list[int]:
        return self.where(lambda t, _: t == "int8_t*")

    @property
    def old_errors(self) -> list[int]:
        return self.where(lambda t, _: t == "const int8_t*")


@functools.cache
def backward_code(policy: str) -> str:
    """Code of the backward of two matrices whose sizes are multiples of the block."""
    layers = [nn.Linear(i, o, bias=False) for o, i in SHAPES]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    with fake_group(NUM_RANKS), fresh_cache():
        # Parameters are kept: backward's buffers are gradients, messages and shards.
        fully_shard(model, mp_policy=POLICIES[policy], reshard_after_forward=False)
        model.compile(backend=LoCoBackend(LoCoConfig(block_numel=BLOCK)))
        _, codes = run_and_get_code(lambda: model(torch.randn(4, 128)).sum().backward())
    return codes[-1]


def kernels(code: str) -> list[Kernel]:
    found = []
    definition = r"(cpp_fused\w*) = async_compile\.cpp_pybinding\(\[(.*?)\], r'''(.*?)'''\)"
    for name, types, source in re.findall(definition, code, re.DOTALL):
        head, body = source.split("{", 1)
        for arguments in re.findall(rf"^ +{name}\((.*)\)$", code, re.MULTILINE):
            found.append(
                Kernel(
                    types=tuple(re.findall(r"'(.*?)'", types)),
                    pointers=tuple(re.findall(r"(\w+)(?=[,)])", head)),
                    arguments=tuple(arguments.split(", ")),
                    body=body,
                )
            )
    return found


def compress_kernels(policy: str) -> list[Kernel]:
    return [k for k in kernels(backward_code(policy)) if k.new_errors]


def loops(body: str) -> list[str]:
    """The outermost loops of a kernel, with what they contain."""
    found, start = [], 0
    while (start := body.find("for(int64_t ", start)) >= 0:
        depth, end = 0, body.index("{", start)
        while True:
            depth += {"{": 1, "}": -1}.get(body[end], 0)
            end += 1
            if not depth:
                break
        found.append(body[start:end])
        start = end
    return found


def bound(loop: str) -> int:
    return int(re.search(r"x\d+<static_cast<int64_t>\((\d+)L\)", loop)[1])


def inner(loop: str) -> list[str]:
    return loops(loop[loop.index("{") :])


@every_policy
def test_one_loop_over_the_blocks_of_each_tensor(policy: str) -> None:
    found = compress_kernels(policy)
    assert len(found) == len(SHAPES)
    for kernel in found:
        planes = [kernel.pointers[i] for i in kernel.new_errors]
        fused = [o for o in loops(kernel.body) if any(f"store({p} " in o for p in planes)]
        # One outer loop over the W * B blocks ...
        (outer,) = fused
        assert bound(outer) == NUMEL // BLOCK
        # ... that holds three over the halves of a block: largest magnitude; codes and the largest
        # magnitude of the new error; the new error.
        absmax, code, error = inner(outer)
        assert [bound(x) for x in (absmax, code, error)] == [BLOCK // 2] * 3
        stores = [re.findall(r"store\((\w+) ", x) for x in (absmax, code, error)]
        (codes,) = kernel.where(lambda t, a: t == "uint8_t*" and numel_of(policy, a) == NUMEL // 2)
        assert stores == [[], [kernel.pointers[codes]], planes]
        assert outer.count("max_propagate_nan") == 2


@every_policy
def test_errors_are_written_where_they_were_read(policy: str) -> None:
    for kernel in compress_kernels(policy):
        old = [kernel.arguments[i] for i in kernel.old_errors]
        new = [kernel.arguments[i] for i in kernel.new_errors]
        assert len(new) == 2
        assert sorted(old) == sorted(new)
        assert all(name.startswith("primals") for name in new)  # inputs of the graph
    # The scales are written back too, perhaps by a later kernel: they are small.
    found = kernels(backward_code(policy))
    is_scale = re.compile(r"primals_\d+").fullmatch
    read, written = (
        {
            kernel.arguments[i]
            for kernel in found
            for i in kernel.where(lambda t, a, w=wanted: t == w and bool(is_scale(a)))
        }
        for wanted in ("const at::BFloat16*", "at::BFloat16*")
    )
    assert len(written) == len(SHAPES)
    assert written <= read


@every_policy
def test_gradients_are_read_where_autograd_left_them(policy: str) -> None:
    code = backward_code(policy)
    product_outputs = {
        root(code, n) for n in re.findall(r"extern_kernels\.mm\(.*out=(\w+)\)", code)
    }
    ctype = "float" if policy == "float32" else "at::BFloat16"
    for kernel in compress_kernels(policy):
        grads = kernel.where(lambda t, a: t == f"const {ctype}*" and numel_of(policy, a) == NUMEL)
        (grad,) = grads
        assert root(code, kernel.arguments[grad]) in product_outputs
        pointer = kernel.pointers[grad]
        uses = re.findall(rf"(\w+::\w+<[\w:,]+>::loadu\()?{pointer}\b(.*)", kernel.body)
        # Both halves in each of the three loops, vectorised, with one linear index.
        assert len(uses) == 6
        for load, index in uses:
            assert load, index
            linear = rf" \+ static_cast<int64_t>\(({BLOCK // 2}L \+ )?x1 \+ {BLOCK}L\*x0\)"
            assert re.match(linear, index), index
        assert "tmpbuf" not in kernel.body


@every_policy
def test_nothing_else_of_a_gradient_s_size_is_written(policy: str) -> None:
    """No gradient in full precision, no padded copy, no error in float."""
    code = backward_code(policy)
    for kernel in compress_kernels(policy):
        outputs = kernel.where(lambda t, _: not t.startswith("const"))
        large = [i for i in outputs if numel_of(policy, kernel.arguments[i]) > NUMEL // BLOCK * 2]
        # The codes; the errors are inputs.
        assert [kernel.types[i] for i in large] == ["uint8_t*"]
    wide = [
        (name, numel)
        for name, (numel, dtype) in allocations(code).items()
        if "float" in dtype and numel >= NUMEL // NUM_RANKS
    ]
    # Two gradients and two shards; or one gradient fewer, where the second reuses its memory.
    gradients = [n for n, numel in wide if numel == NUMEL]
    shards = [n for n, numel in wide if numel == NUMEL // NUM_RANKS]
    assert len(gradients) in (1, 2)
    assert len(shards) == 2
    assert len(wide) == len(gradients) + len(shards)


@every_policy
def test_each_shard_is_one_loop_behind_the_all_to_all(policy: str) -> None:
    shards = [
        (k, i)
        for k in kernels(backward_code(policy))
        for i in k.where(lambda t, a: numel_of(policy, a) == NUMEL // NUM_RANKS)
        if not k.types[i].startswith(("const", "uint8"))
    ]
    assert len(shards) == len(SHAPES)
    for kernel, i in shards:
        writers = [x for x in loops(kernel.body) if f"store({kernel.pointers[i]} " in x]
        assert len(writers) == 1
        assert "tmpbuf" not in writers[0]


# --- reading the wrapper


@functools.cache
def allocations(code: str) -> dict[str, tuple[int, str]]:
    """Buffer -> (elements, dtype)."""
    pattern = r"(\w+) = empty_strided_cpu\(\((.*?)\), \(.*?\), torch\.(\w+)\)"
    return {
        name: (torch.Size(int(s) for s in shape.split(",") if s.strip()).numel(), dtype)
        for name, shape, dtype in re.findall(pattern, code)
    }


def root(code: str, name: str) -> str:
    """The buffer whose memory another one reuses or is a view of."""
    while True:
        pattern = rf"\b{name} = (?:reinterpret_tensor\()?(\w+)[;,]"
        reused = re.search(pattern, code)
        if not reused:
            return name
        name = reused[1]


def numel_of(policy: str, name: str) -> int:
    """Elements of a buffer of the code, 0 if it is no allocated one."""
    code = backward_code(policy)
    return allocations(code).get(root(code, name), (0, ""))[0]
