# SPDX-License-Identifier: Apache-2.0
"""This module lets a method that makes several changes make all of them or none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Journal(list[tuple[Any, Any, Any]]):
    """Lists (where, key, what was there) for all that a call changes, each written down before its change.

    Where is an array, a list or a dict; a list is changed by slices, and a dict holds no None, which stands for a key
    that was not there. To undo is to put back what was there, the last change first. That may be done again from the
    beginning: where it fails itself, as memory is still missing, the next call does it (:func:`all_or_nothing`).

    evicted: how many of the entries are blocks that the prefix cache gave up for this call.
    """

    evicted = 0

    def keep(self, where: Any, key: Any) -> None:
        """Writes down what is about to change."""
        self.append((where, key, where.get(key) if isinstance(where, dict) else where[key].copy()))

    def put(self, where: Any, key: Any, value: Any) -> None:
        self.keep(where, key)
        where[key] = value

    def update(self, where: dict[Any, Any], keys: Collection[Any], values: Iterable[Any]) -> None:
        self += [(where, key, where.get(key)) for key in keys]
        where.update(zip(keys, values, strict=True))

    def drop(self, where: dict[Any, Any], keys: Iterable[Any]) -> None:
        """Deletes those of the keys that are there."""
        there = [key for key in keys if key in where]
        self += [(where, key, where[key]) for key in there]
        for key in there:
            del where[key]

    def keep_evictions(self) -> None:
        """Marks all that has changed up to here as evictions."""
        self.evicted = len(self)

    def settle(self) -> None:
        """Makes what was evicted stay so, whatever happens: bytes are about to be written into those blocks."""
        del self[: self.evicted]

    def undo(self) -> None:
        for where, key, old in reversed(self):
            if old is None:
                where.pop(key, None)
            else:
                where[key] = old
        for ordered in {id(where): where for where, _, _ in self if isinstance(where, OrderedDict)}.values():
            for key in sorted(ordered, key=ordered.__getitem__):  # an entry that came back stands behind the others
                ordered.move_to_end(key)
        self.clear()


class Journaled(Protocol):
    _journal: Journal


Self = TypeVar("Self", bound=Journaled)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def all_or_nothing(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Wraps a method that writes its changes into ``_journal``: where it raises anything, they are undone.

    Nothing may be allocated between the last change and the end of the journal, which is what makes the changes count.
    """

    @wraps(method)
    def whole(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        journal = self._journal
        if journal:
            journal.undo()
        try:
            result = method(self, *args, **kwargs)
        except BaseException:
            journal.undo()
            raise
        journal.clear()
        return result

    return whole
