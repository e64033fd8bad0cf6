class TransformException(Exception):
    """Say why there is no transform."""


class ConnectivityException(TransformException):
    """The frames are not part of one tree."""


class LookupException(TransformException):
    """A frame does not exist."""


class ExtrapolationException(TransformException):
    """The time lies outside of what has been heard."""


class InvalidArgumentException(TransformException):
    """A frame id is empty or begins with a slash."""


class TimeoutException(TransformException):
    """Nothing has come in time."""
