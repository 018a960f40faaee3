"""Reads the pickle inside a torch checkpoint without running it: no import, no call, no object but plain data.

The instructions come from `pickletools`, which only parses. This machine carries out the few that `torch.save` writes
for a dictionary of tensors and refuses the rest, so a pickle cannot name anything that this file does not name.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from inferd.engine.errors import LoadError

MAX_PICKLE_BYTES = 16 << 20
MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class ElementType:
    safetensors_name: str
    num_bytes: int


@dataclass(frozen=True)
class Global:
    """A name in the pickle; never looked up."""

    module: str
    name: str


@dataclass(frozen=True)
class StorageRef:
    key: str
    type: ElementType
    num_elements: int


@dataclass(frozen=True)
class TensorRef:
    """A view of a storage; offset and strides in elements."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.storage.type.num_bytes

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


ELEMENT_TYPES: Mapping[Global, ElementType] = {
    Global("torch", f"{name}Storage"): ElementType(safetensors_name, num_bytes)
    for name, safetensors_name, num_bytes in (
        ("Float", "F32", 4),
        ("Half", "F16", 2),
        ("BFloat16", "BF16", 2),
        ("Double", "F64", 8),
        ("Long", "I64", 8),
        ("Int", "I32", 4),
        ("Short", "I16", 2),
        ("Char", "I8", 1),
        ("Byte", "U8", 1),
        ("Bool", "BOOL", 1),
    )
}
_ALLOWED = {
    Global("collections", "OrderedDict"),
    Global("torch._utils", "_rebuild_tensor_v2"),
    Global("torch._utils", "_rebuild_parameter"),
    *ELEMENT_TYPES,
}

_MARK = object()


def read_pickle(data: bytes, name: str) -> Any:
    """Dictionaries, lists, tuples, texts, numbers and `TensorRef`s. Raises LoadError naming `name` and the cause."""
    if len(data) > MAX_PICKLE_BYTES:
        raise LoadError(f"{name}: the pickle has {len(data)} bytes, more than {MAX_PICKLE_BYTES}")
    machine = _Machine(name)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.pop()
            machine.do(opcode.name, argument)
    except ValueError as error:  # what pickletools raises for bytes that are no instruction
        raise LoadError(f"{name}: damaged pickle: {error}") from error
    raise LoadError(f"{name}: damaged pickle: it does not end")


class _Machine:
    def __init__(self, name: str) -> None:
        self._name = name
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._actions: Mapping[str, Callable[[Any], None]] = {
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), self._stack.append),
            **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), self._stack.append),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._put),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), self._get),
            "NONE": lambda _: self._stack.append(None),
            "NEWTRUE": lambda _: self._stack.append(True),
            "NEWFALSE": lambda _: self._stack.append(False),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "MARK": lambda _: self._stack.append(_MARK),
            "TUPLE": lambda _: self._stack.append(tuple(self._pop_to_mark())),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "APPEND": lambda _: self._extend([self.pop()]),
            "APPENDS": lambda _: self._extend(self._pop_to_mark()),
            "SETITEM": lambda _: self._set_items([self.pop(), self.pop()][::-1]),
            "SETITEMS": lambda _: self._set_items(self._pop_to_mark()),
            "GLOBAL": lambda names: self._global(*names.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._global(*[self.pop(), self.pop()][::-1]),
            "BINPERSID": lambda _: self._storage(self.pop()),
            "REDUCE": lambda _: self._rebuild(*[self.pop(), self.pop()][::-1]),
            "BUILD": lambda _: self._set_state(self.pop()),
        }

    def do(self, instruction: str, argument: Any) -> None:
        action = self._actions.get(instruction)
        if action is None:
            raise self._error(f"the instruction {instruction} is not needed for tensors and refused")
        action(argument)

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise self._error("damaged pickle: a value is missing")
        return self._stack.pop()

    def _error(self, cause: str) -> LoadError:
        return LoadError(f"{self._name}: {cause}")

    def _pop_to_mark(self) -> list[Any]:
        values: list[Any] = []
        while self._stack and self._stack[-1] is not _MARK:
            values.append(self._stack.pop())
        if not self._stack:
            raise self._error("damaged pickle: a mark is missing")
        self._stack.pop()
        return values[::-1]

    def _tuple(self, length: int) -> None:
        self._stack.append(tuple([self.pop() for _ in range(length)][::-1]))

    def _put(self, index: int) -> None:
        value = self.pop()
        self._memo[index] = value
        self._stack.append(value)

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self._error("damaged pickle: it refers to a value that it never stored")
        self._stack.append(self._memo[index])

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise self._error(f"only plain values are read, but something that is no {kind.__name__} is filled")
        return self._stack[-1]

    def _extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _set_items(self, flat: list[Any]) -> None:
        target = self._top(dict)
        keys = flat[::2]
        if len(flat) % 2 or not all(type(key) in (str, int) for key in keys):
            raise self._error("the keys of a dictionary must be texts or whole numbers")
        target.update(zip(keys, flat[1::2], strict=True))

    def _set_state(self, state: Any) -> None:
        """An ordered dictionary's attributes (torch's `_metadata`) carry no weights."""
        self._top(dict)

    def _global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self._error("damaged pickle: a name is no text")
        if Global(module, name) not in _ALLOWED:
            asked = f"{module}.{name}"[:120]
            raise self._error(f"asks for {asked}; only tensors are read, so the file is refused")
        self._stack.append(Global(module, name))

    def _storage(self, identifier: Any) -> None:
        match identifier:
            case ("storage", Global() as kind, str() as key, str(), int() as num_elements) if kind in ELEMENT_TYPES:
                self._stack.append(StorageRef(key, ELEMENT_TYPES[kind], num_elements))
            case _:
                raise self._error("damaged pickle: a storage is not described as torch.save does it")

    def _rebuild(self, function: Any, arguments: Any) -> None:
        match function, arguments:
            case Global("collections", "OrderedDict"), ():
                self._stack.append({})
            case Global("torch._utils", "_rebuild_parameter"), (TensorRef() as tensor, *_):
                self._stack.append(tensor)
            case (
                Global("torch._utils", "_rebuild_tensor_v2"),
                (StorageRef() as storage, int() as offset, tuple() as shape, tuple() as stride, *_),
            ):
                self._stack.append(self._tensor(storage, offset, shape, stride))
            case _:
                raise self._error("a call that builds no tensor is refused")

    def _tensor(self, storage: StorageRef, offset: int, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> TensorRef:
        numbers = (offset, *shape, *stride)
        if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
            raise self._error(f"a tensor has {len(shape)} sizes and {len(stride)} strides")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise self._error("a tensor's offset, sizes and strides must be whole numbers and not negative")
        num_reached = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        if 0 not in shape and (num_reached > storage.num_elements or prod(shape) > storage.num_elements):
            raise self._error(
                f"a tensor of shape {shape} is larger than its storage of {storage.num_elements} elements"
            )
        return TensorRef(storage, offset, shape, stride)
