"""Enough of Triton, on torch, to run our kernels' own source where there is no GPU and no Triton.

A block of values is a tensor, a pointer is a flat tensor with offsets, a kernel runs once for every cell of its
grid. Precision is float32 as on the device; speed is not the point. `installed()` puts it in Triton's place.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import types
from collections.abc import Iterator

import torch
from torch import Tensor


class Pointer:
    def __init__(self, data: Tensor, offsets: Tensor | int = 0):
        self.data, self.offsets = data, offsets
        self.dtype = types.SimpleNamespace(element_ty=data.dtype)

    def __add__(self, more):
        return Pointer(self.data, self.offsets + more)

    __radd__ = __add__


def _flat(data: Tensor) -> Tensor:
    """The storage behind a tensor, so that strides mean what they mean on the device."""
    size = sum((n - 1) * stride for n, stride in zip(data.shape, data.stride(), strict=True)) + 1
    return torch.as_strided(data, (size,), (1,))


class Descriptor:
    """A tensor that is read in blocks; what lies beyond its edge reads as zero."""

    def __init__(self, data: Tensor, shape, strides, block):
        assert list(data.shape) == shape
        assert list(data.stride()) == strides
        self.data, self.block = data, block

    def load(self, start):
        index = tuple(slice(int(s), int(s) + n) for s, n in zip(start, self.block, strict=True))
        part = self.data[index]
        whole = torch.zeros(self.block, dtype=self.data.dtype)
        whole[tuple(slice(0, n) for n in part.shape)] = part
        return whole


class Kernel:
    """A jitted function: called from a kernel it is a function, indexed by a grid it is a launch."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, num_stages=2, **constants):
            pointers = [Pointer(_flat(arg)) if isinstance(arg, Tensor) else arg for arg in args]
            for cell in itertools.product(*map(range, grid)):
                _Cell.here, _Cell.grid = cell, grid
                self.function(*pointers, **constants)

        return launch


class _Cell:
    here: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()


def _load(pointer: Pointer, mask=None, other=0.0):
    offsets = torch.as_tensor(pointer.offsets)
    if mask is None:
        return pointer.data[offsets]
    mask = mask.expand_as(offsets)
    return torch.where(mask, pointer.data[torch.where(mask, offsets, 0)], torch.tensor(other, dtype=pointer.data.dtype))


def _store(pointer: Pointer, value, mask):
    mask = mask.expand_as(pointer.offsets)
    pointer.data[pointer.offsets[mask]] = value.expand_as(pointer.offsets)[mask].to(pointer.data.dtype)


def _dot(a: Tensor, b: Tensor, acc: Tensor | None = None, input_precision: str = "ieee"):
    product = a.float() @ b.float()
    return product if acc is None else acc + product


def language() -> types.ModuleType:
    tl = types.ModuleType("triton.language")
    tl.constexpr = lambda value: value
    tl.float32, tl.int64 = torch.float32, torch.int64
    tl.program_id = lambda axis: torch.tensor(_Cell.here[axis])
    tl.num_programs = lambda axis: _Cell.grid[axis]
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
    """`farspan.attention.kernels`, imported over this instead of Triton."""
    triton = types.ModuleType("triton")
    triton.language = language()
    triton.jit = Kernel
    triton.cdiv = lambda a, b: math.ceil(a / b)
    tools, descriptors = types.ModuleType("triton.tools"), types.ModuleType("triton.tools.tensor_descriptor")
    descriptors.TensorDescriptor = Descriptor
    names = {
        "triton": triton,
        "triton.language": triton.language,
        "triton.tools": tools,
        "triton.tools.tensor_descriptor": descriptors,
    }
    ours = "farspan.attention.kernels"
    import farspan.attention as package

    before = {name: sys.modules.get(name) for name in (*names, ours)}
    attribute = package.__dict__.pop("kernels", None)
    sys.modules.update(names)
    sys.modules.pop(ours, None)
    try:
        import importlib

        yield importlib.import_module(ours)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        package.__dict__.pop("kernels", None)
        if attribute is not None:
            package.kernels = attribute
