"""Calls of torch's functions, met as they are made: no model is asked what its modules do."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class TorchCalls(TorchFunctionMode):
    """Within, every call of a torch function goes through `call`.

    A mode belongs to the thread that enters it.
    """

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, or what it is to be instead."""
        return func(*args, **kwargs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(func, args, kwargs or {})
