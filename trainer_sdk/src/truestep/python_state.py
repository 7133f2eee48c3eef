"""What modules keep in plain Python attributes, put back after a pass that must leave no trace.

A model that counts its forwards in an integer, or appends to a list, would otherwise train differently where it is
audited. Put back are every module's attributes, and what lists, dictionaries, sets and queues in them hold, to any
depth. Not seen: tensors that are no buffers and are written to in place, attributes of objects that are no modules, and
what the loss keeps outside of the model.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_Container = list[Any] | dict[Any, Any] | set[Any] | deque[Any]
_CONTAINERS = (list, dict, set, deque, tuple, OrderedDict, defaultdict, Counter)
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Parameters, buffers, hooks: torch's own bookkeeping."""


@contextmanager
def python_state_kept(module: nn.Module) -> Iterator[None]:
    """Put back the attributes of `module` and of all modules in it at the end, also after an exception."""
    attributes = [(part, _own_attributes(part)) for part in module.modules()]
    containers: dict[int, tuple[_Container, Any]] = {}
    for _, held in attributes:
        for value in held.values():
            _note(value, containers)
    try:
        yield
    finally:
        for part, held in attributes:
            _put_back_attributes(part, held)
        for container, content in containers.values():
            _put_back(container, content)


def _own_attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _TORCHS_OWN}


def _put_back_attributes(part: nn.Module, held: dict[str, Any]) -> None:
    # Past __setattr__, which modules of torch and of users give side effects.
    now = vars(part)
    for name in _own_attributes(part).keys() - held.keys():
        del now[name]
    for name, value in held.items():
        if name not in now or now[name] is not value:
            now[name] = value


def _note(value: Any, containers: dict[int, tuple[_Container, Any]]) -> None:
    # These very types: a class of the user's may refuse to be emptied, or do more than that.
    if type(value) not in _CONTAINERS or id(value) in containers:
        return
    if type(value) is not tuple:
        containers[id(value)] = (value, dict(value) if isinstance(value, dict) else list(value))
    for item in value.values() if isinstance(value, dict) else value:
        _note(item, containers)


def _put_back(container: _Container, content: Any) -> None:
    # In place: whoever else holds the container must find it so too. By identity: tensors have no plain equality.
    if isinstance(container, dict):
        if not _same(container, content) or not _same(container.values(), content.values()):
            container.clear()
            container.update(content)
    elif not _same(container, content):
        container.clear()
        container.update(content) if isinstance(container, set) else container.extend(content)


def _same(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
