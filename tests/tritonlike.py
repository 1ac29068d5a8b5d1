"""A small Triton interpreter on torch, to run the source of our kernels without a GPU or Triton.

A block of values is a tensor, a pointer is a flat tensor with offsets, and a kernel runs once for
every program of its grid. Precision is float32 as on the GPU. `installed()` replaces Triton by it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import sys
import types
from collections.abc import Iterator

import torch
from torch import Tensor

import farspan.attention as package


class Pointer:
    """A flat tensor and the offsets that a kernel addresses in it."""

    def __init__(self, data: Tensor, offsets: Tensor | int = 0):
        self.data, self.offsets = data, offsets
        self.dtype = types.SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offsets):
        return Pointer(self.data, self.offsets + offsets)

    __radd__ = __add__


def _flat(data: Tensor) -> Tensor:
    """The storage of a tensor, which strides address as on the GPU."""
    size = sum((n - 1) * stride for n, stride in zip(data.shape, data.stride(), strict=True)) + 1
    return torch.as_strided(data, (size,), (1,))


class Descriptor:
    """A tensor that is read in blocks; reads beyond its edge are zero."""

    def __init__(self, data: Tensor, shape, strides, block):
        assert list(data.shape) == shape
        assert list(data.stride()) == strides
        self.data, self.block = data, block

    def load(self, start):
        index = tuple(slice(int(s), int(s) + n) for s, n in zip(start, self.block, strict=True))
        inside = self.data[index]
        block = torch.zeros(self.block, dtype=self.data.dtype)
        block[tuple(slice(0, n) for n in inside.shape)] = inside
        return block


class Kernel:
    """A jitted function: called in a kernel it is a function; indexed by a grid it launches."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, num_stages=2, **constants):
            pointers = [Pointer(_flat(arg)) if isinstance(arg, Tensor) else arg for arg in args]
            for program in itertools.product(*map(range, grid)):
                _Launch.program, _Launch.grid = program, grid
                self.function(*pointers, **constants)

        return launch


class _Launch:
    """The program that is running, and its grid."""

    program: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()


def _load(pointer: Pointer, mask=None, other=0.0):
    offsets = torch.as_tensor(pointer.offsets)
    if mask is None:
        return pointer.data[offsets]
    mask = mask.expand_as(offsets)
    return torch.where(
        mask,
        pointer.data[torch.where(mask, offsets, 0)],
        torch.tensor(other, dtype=pointer.data.dtype),
    )


def _store(pointer: Pointer, value, mask):
    mask = mask.expand_as(pointer.offsets)
    pointer.data[pointer.offsets[mask]] = value.expand_as(pointer.offsets)[mask].to(
        pointer.data.dtype
    )


def _dot(a: Tensor, b: Tensor, acc: Tensor | None = None, input_precision: str = "ieee"):
    product = a.float() @ b.float()
    return product if acc is None else acc + product


def language() -> types.ModuleType:
    """The part of `triton.language` that the kernels use."""
    tl = types.ModuleType("triton.language")
    tl.constexpr = lambda value: value
    tl.float32, tl.int64 = torch.float32, torch.int64
    tl.program_id = lambda axis: torch.tensor(_Launch.program[axis])
    tl.num_programs = lambda axis: _Launch.grid[axis]
    tl.arange = torch.arange
    tl.full = lambda shape, value, dtype: torch.full(shape, value, dtype=dtype)
    tl.zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    tl.load, tl.store, tl.dot = _load, _store, _dot
    tl.range = lambda start, stop, step: range(int(start), int(stop), step)
    tl.max = lambda x, axis: x.amax(axis)
    tl.sum = lambda x, axis: x.sum(axis)
    tl.maximum, tl.where = torch.maximum, torch.where
    tl.minimum = lambda a, b: min(int(a), int(b))
    tl.exp2, tl.log2 = torch.exp2, torch.log2
    tl.inline_asm_elementwise = lambda asm, constraints, args, **options: torch.exp2(*args)
    return tl


@contextlib.contextmanager
def installed() -> Iterator[types.ModuleType]:
    """`farspan.attention.kernels`, imported with this module in place of Triton."""
    triton = types.ModuleType("triton")
    triton.language = language()
    triton.jit = Kernel
    triton.cdiv = lambda a, b: math.ceil(a / b)
    tools, descriptors = (
        types.ModuleType("triton.tools"),
        types.ModuleType("triton.tools.tensor_descriptor"),
    )
    descriptors.TensorDescriptor = Descriptor
    modules = {
        "triton": triton,
        "triton.language": triton.language,
        "triton.tools": tools,
        "triton.tools.tensor_descriptor": descriptors,
    }
    module_name = "farspan.attention.kernels"
    before = {name: sys.modules.get(name) for name in (*modules, module_name)}
    attribute = package.__dict__.pop("kernels", None)
    sys.modules.update(modules)
    sys.modules.pop(module_name, None)
    try:
        yield importlib.import_module(module_name)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        package.__dict__.pop("kernels", None)
        if attribute is not None:
            package.kernels = attribute
