"""Labels that continue until a future is done: torch's, those of ``concurrent.futures`` and those of asyncio."""

from __future__ import annotations

import concurrent.futures
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def after(future: Any, end: Callable[[type[BaseException] | None], object]) -> Any:
    """A future of the same kind that is done, with the same outcome, as soon as ``end`` has run after the given one.

    ``end`` is called with the class of the future's exception, or None, on whatever thread the future is done.

    Raises:
        TypeError: it is no future.
    """
    # Who has a future of asyncio's has imported it; for others it would be a tenth of the time of our import.
    asyncio: Any = sys.modules.get("asyncio")
    if hasattr(asyncio, "Future") and isinstance(future, asyncio.Future):
        return _chained(future, future.get_loop().create_future(), asyncio.CancelledError, end)
    if isinstance(future, concurrent.futures.Future):
        return _chained(future, concurrent.futures.Future(), concurrent.futures.CancelledError, end)
    if not hasattr(future, "then"):
        raise TypeError(
            f"{future!r} is no future: a torch.futures.Future, a concurrent.futures.Future or an asyncio.Future is needed"
        )
    return future.then(lambda done: _value(done, end))


def _value(done: Any, end: Callable[[type[BaseException] | None], object]) -> Any:
    try:
        value = done.value()
    except BaseException as error:
        end(type(error))
        raise
    end(None)
    return value


def _chained(
    future: Any, result: Any, cancelled: type[BaseException], end: Callable[[type[BaseException] | None], object]
) -> Any:
    def done(source: Any) -> None:
        if source.cancelled():
            end(cancelled)
            result.cancel()
            return
        error = source.exception()
        end(None if error is None else type(error))
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(source.result())

    future.add_done_callback(done)
    return result
