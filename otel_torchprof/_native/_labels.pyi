# The label module: native/src/sources/python_labels.cc.

import types

from typing_extensions import Self

class Label:  # there only after attach()
    name: str
    args: str | None
    def __init__(self, name: str, args: str | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None: ...
    def suspend(self) -> bool: ...
    def resume(self) -> bool: ...

def attach(address: int) -> None: ...
