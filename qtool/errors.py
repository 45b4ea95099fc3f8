"""What can go wrong, as one small tree.

A message says where, what was found, what was expected, and what to do. It is printed in one
place, `qtool.cli.main`; exit status 1, of a UsageError 2.
"""

TOO_LARGE = (  # of OSErrors with EFBIG
    "a file would be larger than this file system or `ulimit -f` allows; choose another -o, or "
    "raise the limit"
)


RTN_CAN = (  # of models that are not run
    "calibrated methods cannot run this model, RTN can quantize it (it needs no forward pass)"
)


OTHER_MODEL = (  # of a tensor and config.json
    "one of the two is of another model: put the model's own config.json beside its weights, or "
    "fetch the model again"
)


class QtoolError(Exception):
    """Root of every failure that qtool explains in a sentence."""


class RecipeError(QtoolError):
    """A recipe cannot be read or asks for something that does not exist."""


class SourceError(QtoolError):
    """The model, the calibration text or the statistics given cannot be used."""


class SettingError(SourceError):
    """A setting of config.json makes no sense. what: how its sentence goes on after its name.

    Like every other it is made of a whole sentence too, where one is told anew with a path in it.
    """

    def __init__(self, setting: str, what: str | None = None) -> None:
        super().__init__(setting if what is None else f"config.json: {setting} {what}")
        self.setting = None if what is None else setting


class FormatError(QtoolError):
    """A file does not keep to its format, or a format cannot store what it is given."""


class UnsupportedError(QtoolError):
    """The request makes sense, but this version or this machine cannot do it."""


class NoGradientError(UnsupportedError):
    """torch cannot backpropagate through what a model computes, or gradients are not finite."""


class UsageError(QtoolError):
    """The command line says something that no command knows; exit status 2."""


class ResumeError(QtoolError):
    """A started run cannot be continued."""
