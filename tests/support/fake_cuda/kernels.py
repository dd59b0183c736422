"""``ElementwiseKernel`` and ``ReductionKernel``.

The very source that runs on a GPU is compiled for the host, and called on a stream's thread, one
element after the other, from the last to the first: what depends on an order shows.
"""

from __future__ import annotations

import ctypes
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from support.fake_cuda.arrays import ndarray, new
from support.fake_cuda.compiler import compiled
from support.fake_cuda.kernel_params import (
    Param,
    checked_args,
    ctype_of,
    decided,
    described,
    parsed,
    pointers,
)
from support.fake_cuda.launch import check_device, launch

_ELEMENTWISE = string.Template(
    """
$types
$preamble
extern "C" void run(long long _size, void* const* _args) {
  $params
  CIndexer _ind(_size);
  blockDim.x = $block_size; gridDim.x = (_size + blockDim.x - 1) / blockDim.x;
  $loop_prep;
  for (ptrdiff_t _step = 0; _step < _size; ++_step) {
    ptrdiff_t i = _size - 1 - _step;
    blockIdx.x = i / blockDim.x; threadIdx.x = i % blockDim.x;
    _ind.set(i);
    $elements
    $operation;
  }
  $after_loop;
}
"""
)

_REDUCTION = string.Template(
    """
$types
typedef $reduce_type _type_reduce;
$preamble
static inline _type_reduce _reduce(_type_reduce a, _type_reduce b) { return $reduce_expr; }
extern "C" void run(long long _outs, long long _ins, void* const* _args) {
  $params
  CIndexer _ind(_outs);
  for (ptrdiff_t _out = 0; _out < _outs; ++_out) {
    _type_reduce a;
    bool _first = true;
    $identity
    for (ptrdiff_t _in = _ins - 1; _in >= 0; --_in) {
      ptrdiff_t _j = _out * _ins + _in;
      _ind.set(_j);
      $elements
      _type_reduce _one = static_cast<_type_reduce>($map_expr);
      a = _first ? _one : _reduce(a, _one);
      _first = false;
    }
    _ind.set(_out);
    $results
    $post_map_expr;
  }
}
"""
)


def _declared(params: Sequence[Param], args: Sequence[Any]) -> str:
    lines = []
    for at, (param, arg) in enumerate(zip(params, args, strict=True)):
        if isinstance(arg, _Array):
            name = param.name if param.raw else f"_raw_{param.name}"
            kind = f"CArray<{param.ctype}, {arg.host.ndim}>"
            lines.append(f"const {kind} {name}(_args[{at}]);")
        else:
            lines.append(f"const {param.ctype} {param.name} = *({param.ctype}*)_args[{at}];")
    return "\n  ".join(lines)


class _Array:
    """The memory of an array, as a kernel gets it."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self.block = described(host)


def _elements(params: Sequence[Param], args: Sequence[Any], const: bool) -> str:
    mark = "const " if const else ""
    return "\n    ".join(
        f"{mark}{p.ctype} &{p.name} = _raw_{p.name}[_ind.get()];"
        for p, arg in zip(params, args, strict=True)
        if isinstance(arg, _Array) and not p.raw
    )


def _types(found: dict[str, Any]) -> str:
    return "\n".join(f"typedef {ctype_of(d)} {letter};" for letter, d in sorted(found.items()))


def _value(value: Any, param: Param, found: dict[str, Any]) -> Any:
    dtype = param.dtype if param.letter is None else found[param.letter]
    return np.asarray(value).astype(dtype)


def _blocks(args: Sequence[Any]) -> list[Any]:
    return [arg.block if isinstance(arg, _Array) else arg for arg in args]


class _Kernel:
    """What the two kinds that are made of expressions have in common."""

    def __init__(self, in_params: str, out_params: str, name: str) -> None:
        if not name.isidentifier():
            raise ValueError(f'Invalid kernel name: "{name}"')
        self.in_params, self.out_params = parsed(in_params), parsed(out_params)
        self.params = self.in_params + self.out_params
        self.nin, self.nout = len(self.in_params), len(self.out_params)
        self.nargs = self.nin + self.nout
        self.name = self.__name__ = name

    def _checked(self, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        if len(args) not in (self.nin, self.nargs):
            raise TypeError(
                f"Wrong number of arguments for {self.name!r}. It must be either {self.nin} or "
                f"{self.nargs} (with outputs), but given {len(args)}."
            )
        checked_args(args)
        ins, outs = list(args[: self.nin]), list(args[self.nin :])
        for out in outs:
            if not isinstance(out, ndarray):
                raise TypeError("Output arguments type must be cupy.ndarray")
        check_device(*[arg for arg in args if isinstance(arg, ndarray)])
        return ins, outs

    def _taken(self, args: Sequence[Any], found: dict[str, Any], how: Any) -> list[Any]:
        return [
            _Array(how(param, arg)) if isinstance(arg, ndarray) else _value(arg, param, found)
            for param, arg in zip(self.params, args, strict=True)
        ]


class ElementwiseKernel(_Kernel):
    """A kernel that does something for every index."""

    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str = "kernel",
        reduce_dims: bool = True,
        preamble: str = "",
        no_return: bool = False,
        return_tuple: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_params, out_params, name)
        if unknown := set(kwargs) - {"loop_prep", "after_loop", "options"}:
            raise TypeError(f"unexpected keyword arguments {sorted(unknown)}")
        if "i" in [param.name for param in self.params]:
            raise ValueError("Can not use 'i' as a parameter name")
        self.operation, self.preamble, self.kwargs = operation, preamble, kwargs
        self.no_return, self.return_tuple = no_return, return_tuple
        self.reduce_dims = reduce_dims

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        size, stream = kwargs.pop("size", -1), kwargs.pop("stream", None)
        block_size = kwargs.pop("block_size", 128)
        if kwargs:
            raise TypeError(f"Wrong arguments {kwargs}")
        if block_size <= 0:
            raise ValueError("block_size must be greater than zero")
        ins, outs = self._checked(args)
        shape = self._shape([*ins, *outs], size)
        found = decided(self.in_params, self.out_params, ins, outs)
        outs = outs or self._made(shape, found, size)
        for param, out in zip(self.out_params, outs, strict=True):
            if not param.raw and out.shape != shape:
                raise ValueError("Out shape is mismatched")
        if 0 not in shape:
            self._launch(ins, outs, shape, found, block_size, stream)
        if self.no_return:
            return None
        return outs[0] if self.nout == 1 and not self.return_tuple else tuple(outs)

    def _shape(self, args: list[Any], size: int) -> tuple[int, ...]:
        shapes = [
            arg.shape
            for param, arg in zip(self.params, args, strict=False)
            if isinstance(arg, ndarray) and not param.raw
        ]
        if size != -1:
            if shapes:
                raise ValueError(
                    "Specified 'size' can be used only if all of the ndarray are 'raw'."
                )
            return (size,)
        if not shapes:
            raise ValueError("Loop size is undecided.")
        return np.broadcast_shapes(*shapes)

    def _made(self, shape: tuple[int, ...], found: dict[str, Any], size: int) -> list[Any]:
        if size == -1 and any(param.raw for param in self.out_params):
            raise ValueError("Output array size is Undecided")
        return [
            new(shape, p.dtype if p.letter is None else found[p.letter]) for p in self.out_params
        ]

    def _launch(
        self, ins: Any, outs: Any, shape: Any, found: dict[str, Any], block_size: int, stream: Any
    ) -> None:
        def how(param: Param, array: ndarray) -> Any:
            return array._host if param.raw else np.broadcast_to(array._host, shape)

        args = self._taken([*ins, *outs], found, how)
        source = _ELEMENTWISE.substitute(
            types=_types(found),
            preamble=self.preamble,
            params=_declared(self.params, args),
            elements="\n    ".join(
                (
                    _elements(self.in_params, args[: self.nin], const=True),
                    _elements(self.out_params, args[self.nin :], const=False),
                )
            ),
            block_size=block_size,
            operation=self.operation,
            loop_prep=self.kwargs.get("loop_prep", ""),
            after_loop=self.kwargs.get("after_loop", ""),
        )
        run = compiled(source, self.kwargs.get("options", ())).run
        blocks, count = _blocks(args), int(np.prod(shape, dtype=object))

        def work() -> None:
            # It holds what the addresses in the blocks lead to.
            assert args
            run(ctypes.c_longlong(count), pointers(blocks))

        reads = [arg for arg in ins if isinstance(arg, ndarray)]
        launch(f"kernel {self.name}", work, reads, outs, stream, size=count)


class ReductionKernel(_Kernel):
    """A kernel that combines what it computes for every index."""

    def __init__(
        self,
        in_params: str,
        out_params: str,
        map_expr: str,
        reduce_expr: str,
        post_map_expr: str,
        identity: Any,
        name: str = "reduce_kernel",
        reduce_type: str | None = None,
        reduce_dims: bool = True,
        preamble: str = "",
        options: tuple[str, ...] = (),
    ) -> None:
        super().__init__(in_params, out_params, name)
        self.map_expr, self.reduce_expr = map_expr, reduce_expr
        self.post_map_expr, self.identity = post_map_expr, identity
        self.reduce_type = reduce_type or self.out_params[0].ctype
        self.preamble, self.options = preamble, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, axis = kwargs.pop("out", None), kwargs.pop("axis", None)
        keepdims, stream = kwargs.pop("keepdims", False), kwargs.pop("stream", None)
        if kwargs:
            raise TypeError(f"Wrong arguments {kwargs}")
        ins, outs = self._checked(args if out is None else (*args, out))
        arrays = [
            arg.shape
            for param, arg in zip(self.in_params, ins, strict=True)
            if isinstance(arg, ndarray) and not param.raw
        ]
        shape = np.broadcast_shapes(*arrays)
        axes = range(len(shape)) if axis is None else np.atleast_1d(axis)
        gone = sorted(int(a) % len(shape) for a in axes)
        kept = [a for a in range(len(shape)) if a not in gone]
        found = decided(self.in_params, self.out_params, ins, outs)
        result = tuple(
            1 if a in gone else n for a, n in enumerate(shape) if keepdims or a not in gone
        )
        if not outs:
            outs = [
                new(result, p.dtype if p.letter is None else found[p.letter])
                for p in self.out_params
            ]
        if any(one.shape != result for one in outs):
            raise ValueError("Out shape is mismatched")
        self._launch(ins, outs, shape, (kept, gone), found, stream)
        return outs[0] if self.nout == 1 else tuple(outs)

    def _launch(
        self, ins: Any, outs: Any, shape: Any, axes: Any, found: dict[str, Any], stream: Any
    ) -> None:
        kept, gone = axes
        out_ids = {id(out) for out in outs}

        def how(param: Param, array: ndarray) -> Any:
            if param.raw or id(array) in out_ids:
                return array._host
            return np.broadcast_to(array._host, shape).transpose([*kept, *gone])

        args = self._taken([*ins, *outs], found, how)
        identity = self.identity
        source = _REDUCTION.substitute(
            types=_types(found),
            preamble=self.preamble,
            reduce_type=self.reduce_type,
            reduce_expr=self.reduce_expr,
            params=_declared(self.params, args),
            identity="" if identity in (None, "") else f"a = {identity}; _first = false;",
            elements=_elements(self.in_params, args[: self.nin], const=True),
            results=_elements(self.out_params, args[self.nin :], const=False),
            map_expr=self.map_expr,
            post_map_expr=self.post_map_expr,
        )
        run = compiled(source, self.options).run
        sizes = [int(np.prod([shape[a] for a in part], dtype=object)) for part in (kept, gone)]
        if not sizes[1] and identity in (None, ""):
            raise ValueError(f"zero-size array to reduction operation {self.name}")
        blocks = _blocks(args)

        def work() -> None:
            assert args
            run(*[ctypes.c_longlong(size) for size in sizes], pointers(blocks))

        reads = [arg for arg in ins if isinstance(arg, ndarray)]
        launch(f"kernel {self.name}", work, reads, outs, stream, size=sizes[0])
