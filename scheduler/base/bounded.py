"""A dict that forgets its oldest entries."""

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoundedDict(dict[_Key, _Value]):
    """A dict of the entries that came last, at most `most` of them."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        if key not in self and len(self) >= self._most:
            del self[next(iter(self))]
        super().__setitem__(key, value)
