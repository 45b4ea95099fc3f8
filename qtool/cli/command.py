"""What every subcommand has besides what Typer gives it.

Options that name one input are refused when they are given more than once, where parsers take the
last. Of numbers, outputs and the like the last one counts, as usual.
"""

from typing import Any

from typer.core import TyperCommand

from qtool import bytecode
from qtool.errors import QtoolError

_INSTEAD = {
    "calibration": "; several texts are mixed by a YAML file that names them, `- FILE` in each "
    "line: --calibration mix.yaml",
    "recipe": "; `qtool matrix` takes several recipes",
    "text": "",
    "against": "",
    "imatrix": "",
    "stats": "",
}


class Command(TyperCommand):
    """A command that would rather be asked again than do half of what was asked."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises a usage error for an input that was given twice."""
        if args and not ctx.resilient_parsing:
            *_, order = self.make_parser(ctx).parse_args(args=[*args])
            named = [one for one in order if one.name in _INSTEAD and not one.multiple]
            for one in named:
                if one.param_type_name == "option" and named.count(one) > 1:
                    ctx.fail(
                        f"{one.opts[0]} is given more than once, and takes one value"
                        f"{_INSTEAD[one.name]}"
                    )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Raises QtoolError for bytecode that cannot be read, where Typer says `Aborted!`."""
        try:
            return super().invoke(ctx)
        except bytecode.ERRORS as error:
            if (said := bytecode.damaged(error)) is None:
                raise
            raise QtoolError(said) from error
